//! The values against the kernel and `nft`.

use std::net::IpAddr;
use std::time::Duration;

use flannel_core::address::Family;
use flannel_core::kernel::KernelError;
use flannel_netlink::netfilter::NetfilterSocket;
use flannel_netlink::nftables::{
    Base, Batches, Chain, ChainHead, Expr, Marks, Set, Table, TableFamily, address_of, arrived_by,
    at_one_moment, batch, hook, is_device, kind, meta, octets, verdict,
};
use flannel_netlink::testing::{in_netns, run};
use libc::EEXIST;
use test_support::eventually;

const TABLE: Table<'_> = Table { family: TableFamily::Ip, name: "test" };
const PATIENCE: Duration = Duration::from_secs(20);

fn nft(command: &str) -> String {
    run("nft", command)
}

fn base(kind: &str, hook: u32, priority: i32) -> Option<Base> {
    Some(Base { kind: kind.to_owned(), hook, priority, policy: verdict::ACCEPT })
}

fn make(socket: &mut NetfilterSocket, table: Table<'_>, chain: &Chain) {
    let mut batch = batch();
    table.make(&mut batch, "a test");
    chain.make(&mut batch, &table, "first", "a chain");
    socket.commit(batch).unwrap();
}

fn read(socket: &mut NetfilterSocket, table: Table<'_>) -> Option<Chain> {
    Chain::read(socket, &table, &["first"]).unwrap().remove(0)
}

fn commit(socket: &mut NetfilterSocket, batches: Batches) -> usize {
    batches.into_iter().map(|batch| socket.commit(batch).unwrap()).count()
}

#[test]
fn each_instruction_is_read_as_it_was_written() {
    in_netns(|| {
        let mut socket = NetfilterSocket::open().unwrap();
        let is = |value: &[u8]| Expr::Compare { equal: true, value: value.to_vec() };
        let device = "eth0".parse().unwrap();
        nft("add table ip test");
        nft("add set ip test known { type ipv4_addr . ipv4_addr; }");
        nft("add map ip test marks { type ipv4_addr : mark; }");
        let mut filter = vec![
            vec![Expr::Meta(meta::L4PROTO), is(&[17]), Expr::Verdict(verdict::RETURN)],
            vec![
                address_of(Family::V4, true),
                Expr::AppendHeader { offset: 12, len: 4 },
                Expr::MaskAppended(vec![255, 255, 255, 0]),
                Expr::Lookup { set: "known".to_owned(), is_in: true },
                Expr::Counter,
                Expr::Verdict(verdict::DROP),
            ],
            vec![
                address_of(Family::V4, false),
                Expr::Mask(vec![255, 255, 0, 0]),
                Expr::Compare { equal: false, value: vec![10, 1, 0, 0] },
                Expr::Transport { offset: 2, len: 2 },
                is(&8285_u16.to_be_bytes()),
                Expr::Value(7_u32.to_ne_bytes().into()),
                Expr::SetMeta(meta::MARK),
                Expr::Verdict(verdict::ACCEPT),
            ],
            arrived_by(device).to_vec(),
            vec![
                address_of(Family::V4, true),
                Expr::Map { map: "marks".to_owned() },
                Expr::SetMeta(meta::MARK),
            ],
        ];
        filter[3].push(Expr::Counter);
        let mut arriving = filter.clone();
        arriving.push(vec![Expr::WayBack, Expr::Compare { equal: false, value: vec![0; 4] }]);
        let local = Expr::Compare { equal: true, value: kind::LOCAL.to_ne_bytes().into() };
        arriving.push(vec![Expr::KindAtArrival, local.clone()]);
        filter.push(vec![Expr::SourceKind, local]);
        let v4 = Some(Family::V4);
        let address = || Expr::Value(vec![192, 0, 2, 7]);
        let ports = || [Expr::FirstPort(1024), Expr::LastPort(65535)];
        let nat = vec![
            vec![Expr::Meta(meta::OIFNAME), is_device(device), Expr::Masquerade { flags: 16 }],
            vec![Expr::Masquerade { flags: 0 }],
            [&ports()[..], &[Expr::SourceNat { address: None, ports: true, flags: 0 }]].concat(),
            vec![address(), Expr::SourceNat { address: v4, ports: false, flags: 16 }],
            [&[address()], &ports()[..], &[Expr::SourceNat { address: v4, ports: true, flags: 0 }]]
                .concat(),
        ];
        let chains = [
            ("filter", hook::INPUT, -310, arriving),
            ("filter", hook::OUTPUT, 5, vec![]),
            ("filter", hook::OUTPUT, 6, filter),
            ("nat", hook::POSTROUTING, 100, nat),
        ];
        for (kind, hook, priority, rules) in chains {
            let chain = Chain { base: base(kind, hook, priority), rules };
            make(&mut socket, TABLE, &chain);
            assert_eq!(read(&mut socket, TABLE), Some(chain));
            let heads = ChainHead::all(&mut socket, TableFamily::Ip).unwrap();
            assert_eq!(heads[0].name, "first");
            assert_eq!(heads[0].base, base(kind, hook, priority));
            nft("flush chain ip test first");
            let mut removal = batch();
            TABLE.remove_chain(&mut removal, "first");
            socket.commit(removal).unwrap();
            assert!(!TABLE.has_chain(&mut socket, "first").unwrap());
        }
    });
}

#[test]
fn unknown_instructions_differ_and_are_written_again() {
    in_netns(|| {
        let mut socket = NetfilterSocket::open().unwrap();
        nft("add table inet test");
        let table = Table { family: TableFamily::Inet, name: "test" };
        nft("add chain inet test a");
        nft("add chain inet test b");
        nft("add chain inet test first");
        let rules = [
            "jump a",
            "jump b",
            "goto b",
            "log prefix \"one\"",
            "log prefix \"two\"",
            "ct state new accept",
        ];
        for rule in rules {
            nft(&format!("add rule inet test first {rule}"));
        }
        let chain = read(&mut socket, table).unwrap();
        assert_eq!(chain.base, None, "nothing but jumps reaches it");
        for (n, rule) in chain.rules.iter().enumerate() {
            assert!(chain.rules[..n].iter().all(|other| other != rule), "{rule:?}");
        }
        let listing = nft("list chain inet test first");
        let mut flush = batch();
        table.flush_chain(&mut flush, "first");
        socket.commit(flush).unwrap();
        assert_eq!(read(&mut socket, table).unwrap().rules, [[]; 0]);
        make(&mut socket, table, &chain);
        assert_eq!(nft("list chain inet test first"), listing);
    });
}

#[test]
fn a_table_is_made_once_and_a_chain_keeps_its_rules() {
    in_netns(|| {
        let mut socket = NetfilterSocket::open().unwrap();
        assert_eq!(TABLE.head(&mut socket).unwrap(), None);
        assert_eq!(TABLE.rules(&mut socket), Ok(Vec::new()));
        assert_eq!(TABLE.counted(&mut socket), Ok(0));
        assert_eq!(read(&mut socket, TABLE), None);
        let mut chain =
            Chain { base: base("filter", hook::INPUT, 0), rules: vec![vec![Expr::Counter]] };
        make(&mut socket, TABLE, &chain);
        make(&mut socket, TABLE, &chain);
        chain.rules.push(vec![Expr::Counter]);
        assert_eq!(read(&mut socket, TABLE), Some(chain));
        let head = TABLE.head(&mut socket).unwrap().unwrap();
        assert_eq!(head.flags, 0);
        assert_eq!(head.uses, 1);
        let mut new = batch();
        TABLE.make_new(&mut new, &"a comment that is cut, ".repeat(20));
        assert!(KernelError::from(socket.commit(new).unwrap_err()).is(EEXIST));
        let mut anew = batch();
        TABLE.remove(&mut anew);
        TABLE.make_new(&mut anew, &"a comment that is cut, ".repeat(20));
        socket.commit(anew).unwrap();
        assert_eq!(TABLE.head(&mut socket).unwrap().unwrap().uses, 0);
    });
}

#[test]
fn elements_need_as_many_transactions_as_the_kernel_takes() {
    in_netns(|| {
        let mut socket = NetfilterSocket::open().unwrap();
        let mut first = batch();
        TABLE.make(&mut first, "a test");
        socket.commit(first).unwrap();
        for (name, family, addresses, marks) in [
            ("v4", Family::V4, 1, Marks::None),
            ("pairs", Family::V4, 2, Marks::None),
            ("v6", Family::V6, 1, Marks::None),
            ("six", Family::V6, 4, Marks::None),
            ("marked-v4", Family::V4, 1, Marks::First),
            ("marked-v6", Family::V6, 1, Marks::First),
            ("map-v4", Family::V4, 1, Marks::Value),
            ("map-v6", Family::V6, 1, Marks::Value),
        ] {
            let set = Set { table: TABLE, family, name, addresses, marks };
            assert_eq!(set.head(&mut socket).unwrap(), None);
            let mut batches = Batches::default();
            set.make(batches.last(), 1);
            let address = |n: u32| match family {
                Family::V4 => octets(IpAddr::from(n.to_be_bytes())),
                Family::V6 => octets(IpAddr::from(u128::from(n).to_be_bytes())),
            };
            let mark = [1, 2, 3, 4];
            let element = |n: u32| match marks {
                Marks::None => address(n).repeat(addresses as usize),
                Marks::First => [&mark[..], &address(n)].concat(),
                Marks::Value => [&address(n)[..], &mark].concat(),
            };
            let all: Vec<_> = (1..9000).map(element).collect();
            batches.put(&set, &all);
            assert!(commit(&mut socket, batches) > 1);
            let head = set.head(&mut socket).unwrap().unwrap();
            assert_eq!(head.flags, set.flags());
            assert_eq!(head.element_len, set.element_len());
            // The kernel may still resize the set.
            let are_there = || {
                let mut found = set.elements(&mut socket).unwrap();
                found.sort();
                found.dedup();
                found == all
            };
            eventually(PATIENCE, are_there, || name);
            // One by one, and an element that is missing, whose error the kernel sends back.
            let mut batches = Batches::default();
            for element in &all[..300] {
                batches.delete(&set, std::slice::from_ref(element));
            }
            assert_eq!(commit(&mut socket, batches), 2);
            let mut batches = Batches::default();
            batches.delete(&set, &all[..1]);
            let mut refused = batches.into_iter().map(|batch| socket.commit(batch).unwrap_err());
            assert!(KernelError::from(refused.next().unwrap()).is_absent());
        }
    });
}

#[test]
fn a_read_that_another_program_disturbs_is_repeated() {
    in_netns(|| {
        let mut socket = NetfilterSocket::open().unwrap();
        let mut disturbances = 3;
        let found = at_one_moment(
            &mut socket,
            |error| error,
            |_| {
                if disturbances == 0 {
                    return Ok(7);
                }
                disturbances -= 1;
                nft("add table ip other");
                nft("delete table ip other");
                Err(KernelError::new(2))
            },
        );
        assert_eq!(found, Ok(7));
        assert_eq!(disturbances, 0);
        let error = at_one_moment(
            &mut socket,
            |error| error,
            |_| {
                nft("add table ip other");
                nft("delete table ip other");
                Ok(())
            },
        );
        assert!(error.unwrap_err().to_string().contains("16 attempts"));
        let error =
            at_one_moment(&mut socket, |error| error, |_| Err::<(), _>(KernelError::new(2)));
        assert_eq!(error.unwrap_err(), KernelError::new(2));
    });
}
