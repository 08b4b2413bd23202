//! Batches are atomic. Changes by other programs are reported, our own are not.

use std::time::Duration;

use flannel_netlink::netfilter::{
    Batch, Kind, Make, NetfilterEvents, NetfilterMessage, NetfilterSocket, Refused,
};
use flannel_netlink::testing::in_netns_async;
use libc::{EINVAL, EMSGSIZE, ENOENT, EOPNOTSUPP};

/// `NFNL_SUBSYS_NFTABLES`, `NFNLGRP_NFTABLES`, `NFPROTO_IPV4`, `NFT_MSG_…`. Attribute 1 is the
/// name.
const NFTABLES: u8 = 10;
const GROUP: u32 = 7;
const IPV4: u8 = 2;
const NEWTABLE: u8 = 0;
const GETTABLE: u8 = 1;
const DELTABLE: u8 = 2;
const NAME: u16 = 1;

fn table(batch: &mut Batch, number: u8, make: Make, name: &str) {
    batch.add(number, IPV4, make, |request| _ = request.text(NAME, name));
}

fn name(message: &NetfilterMessage<'_>) -> Option<String> {
    let (_, value) = message.attributes.into_iter().find(|(kind, _)| *kind == NAME)?;
    Some(String::from_utf8_lossy(value).trim_end_matches('\0').to_owned())
}

fn tables(socket: &mut NetfilterSocket) -> Vec<String> {
    let kind = Kind { subsystem: NFTABLES, number: GETTABLE, family: IPV4 };
    socket
        .dump(kind, |_| (), |message| (message.kind.number == NEWTABLE).then(|| name(message))?)
        .unwrap()
}

fn make(socket: &mut NetfilterSocket, name: &str) {
    let mut batch = Batch::new(NFTABLES);
    table(&mut batch, NEWTABLE, Make::Create, name);
    socket.commit(batch).unwrap();
}

#[test]
fn a_batch_is_atomic() {
    in_netns_async(|| async {
        let mut socket = NetfilterSocket::open().unwrap();
        assert_eq!(socket.commit(Batch::new(NFTABLES)), Ok(()), "an empty batch succeeds");
        let mut batch = Batch::new(NFTABLES);
        table(&mut batch, NEWTABLE, Make::Create, "one");
        table(&mut batch, DELTABLE, Make::Nothing, "absent");
        table(&mut batch, NEWTABLE, Make::Create, "two");
        let refused = socket.commit(batch).unwrap_err();
        assert_eq!(refused.change, Some(1), "{refused:?}");
        assert!(refused.error.is(ENOENT), "{refused:?}");
        assert_eq!(tables(&mut socket), Vec::<String>::new());
        let mut batch = Batch::new(NFTABLES);
        for name in ["one", "two", "one"] {
            table(&mut batch, NEWTABLE, Make::Create, name);
        }
        assert_eq!(socket.commit(batch), Ok(()));
        assert_eq!(tables(&mut socket), ["one", "two"]);
    });
}

/// The answers to all changes of the longest batch fit into the receive buffer.
#[test]
fn a_batch_has_room_for_200_changes() {
    in_netns_async(|| async {
        let mut socket = NetfilterSocket::open().unwrap();
        let batch_of = |changes| {
            let mut batch = Batch::new(NFTABLES);
            for _ in 0..changes {
                table(&mut batch, NEWTABLE, Make::Create, "one");
            }
            batch
        };
        assert_eq!(socket.commit(batch_of(200)), Ok(()));
        let refused = socket.commit(batch_of(201)).unwrap_err();
        assert_eq!(refused.change, None);
        assert!(refused.error.is(EMSGSIZE), "{refused:?}");
    });
}

#[test]
fn a_query_finds_an_object_or_reports_it_absent() {
    in_netns_async(|| async {
        let mut socket = NetfilterSocket::open().unwrap();
        make(&mut socket, "one");
        let kind = Kind { subsystem: NFTABLES, number: GETTABLE, family: IPV4 };
        let mut ask =
            |wanted: &str| socket.ask(kind, |request| _ = request.text(NAME, wanted), name);
        assert_eq!(ask("one"), Ok("one".to_owned()));
        assert!(ask("two").unwrap_err().is_absent());
    });
}

#[test]
fn a_missing_subsystem_refuses_the_whole_batch() {
    in_netns_async(|| async {
        let mut batch = Batch::new(15);
        table(&mut batch, NEWTABLE, Make::Create, "one");
        let refused = NetfilterSocket::open().unwrap().commit(batch).unwrap_err();
        let Refused { change: None, error } = refused else { panic!("{refused:?}") };
        assert!(error.is(EINVAL) || error.is(EOPNOTSUPP), "{error}");
    });
}

#[test]
fn only_changes_by_other_programs_are_reported() {
    in_netns_async(|| async {
        let mut own = NetfilterSocket::open().unwrap();
        let mut other = NetfilterSocket::open().unwrap();
        let mut events = NetfilterEvents::listen(GROUP, own.port()).unwrap();
        let concerns = |message: &NetfilterMessage<'_>| {
            name(message).is_some_and(|name| name.starts_with("mine"))
        };
        make(&mut own, "mine");
        make(&mut other, "foreign");
        let silence =
            tokio::time::timeout(Duration::from_millis(100), events.changed(concerns)).await;
        assert!(silence.is_err(), "neither our own change nor an irrelevant one is reported");
        make(&mut other, "mine too");
        tokio::time::timeout(Duration::from_secs(10), events.changed(concerns))
            .await
            .unwrap()
            .unwrap();
    });
}

#[test]
fn lost_messages_are_reported_as_a_change() {
    in_netns_async(|| async {
        let mut other = NetfilterSocket::open().unwrap();
        let mut events = NetfilterEvents::listen(GROUP, 0).unwrap();
        // Nothing reads the socket while the changes are made, so its buffer overflows.
        for n in 0..5_000 {
            make(&mut other, &format!("table {n}"));
        }
        let concerns_nothing = |_: &NetfilterMessage<'_>| false;
        tokio::time::timeout(Duration::from_secs(10), events.changed(concerns_nothing))
            .await
            .unwrap()
            .unwrap();
        let silence =
            tokio::time::timeout(Duration::from_millis(100), events.changed(concerns_nothing))
                .await;
        assert!(silence.is_err(), "it is reported once");
    });
}
