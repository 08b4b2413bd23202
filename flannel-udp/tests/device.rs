//! Tun devices, which another program makes, on the kernel. Here, because an ordinary user may not
//! be allowed to open `/dev/net/tun`.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use flannel_core::Kernel;
use flannel_core::kernel::{Footprint, Outcome};
use flannel_core::object::{Change, Link, LinkKind, LinkName, Object, Tun};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::testing::{in_netns, ip};

fn footprint() -> Footprint {
    let name: LinkName = "flannel0".parse().unwrap();
    Footprint { links: [name].into(), ..Footprint::default() }
}

fn device(mtu: u32) -> Link {
    Link { name: "flannel0".parse().unwrap(), mtu, up: true, kind: LinkKind::Tun(Tun) }
}

#[test]
fn a_tun_device_is_adopted_when_its_program_has_made_it() {
    in_netns(|| {
        let kernel = NetlinkKernel::open().unwrap();
        kernel.may_change(&[device(1472)]).unwrap();
        let put = |mtu| kernel.apply(&footprint(), &[Change::Put(device(mtu).into())]).remove(0);
        assert_eq!(put(1472), Outcome::Started);
        ip("tuntap add dev flannel0 mode tun multi_queue vnet_hdr");
        let index = || ip("-j link show flannel0");
        assert_eq!(put(1472), Outcome::Done);
        let there = kernel.snapshot(&footprint()).unwrap();
        assert_eq!(there.iter().cloned().collect::<Vec<_>>(), [Object::from(device(1472))]);
        assert_eq!(put(1400), Outcome::Done);
        let shown: serde_json::Value = serde_json::from_str(&index()).unwrap();
        assert_eq!(shown[0]["mtu"], 1400);
        // The queue to the program. Without it all packets would be dropped.
        assert_eq!(shown[0]["txqlen"], 500);
        let deletion = [Change::Delete(device(1400).into())];
        assert_eq!(kernel.apply(&footprint(), &deletion), [Outcome::Done]);
        assert!(kernel.snapshot(&footprint()).unwrap().is_empty());
        // A device of another program, of another form.
        ip("tuntap add dev flannel0 mode tap");
        assert_eq!(put(1472), Outcome::Started);
        assert!(kernel.snapshot(&footprint()).unwrap().is_empty(), "it was deleted");
    });
}
