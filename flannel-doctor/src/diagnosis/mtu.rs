//! One repair for all paths that lose large packets.
//!
//! Pods have one MTU, so the narrowest path decides. The MTU must suffice for every enabled family.
//! With a tunnel the network config sets it. Without one it is the MTU of the external interface.

use std::net::IpAddr;

use flannel_core::Remedy;
use flannel_core::address::Family;

use crate::finding::Finding;
use crate::inputs::devices::Devices;

/// A finding, with the place on the path that caused it by its small MTU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The finding.
    pub finding: Finding,
    /// The place with the smaller MTU, or `None` if the fault has another cause.
    pub narrow: Option<Narrow>,
}

impl From<Finding> for Fault {
    fn from(finding: Finding) -> Self {
        Self { finding, narrow: None }
    }
}

impl Fault {
    /// A fault that a small MTU causes.
    pub fn new(finding: Finding, narrow: Narrow) -> Self {
        Self { finding, narrow: Some(narrow) }
    }
}

/// A place that passes only packets smaller than the MTU of pods. `takes` is the largest `MTU` in
/// the network config with which packets pass, or without a tunnel the largest MTU of the external
/// interface. All values are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Narrow {
    /// The path to an address.
    Way {
        /// The address.
        to: IpAddr,
        /// The largest `MTU` with which packets pass; `None` if it is not known.
        takes: Option<u32>,
    },
    /// This host's external interface.
    Uplink {
        /// Its MTU.
        takes: u32,
        /// The MTU that full packets need.
        needed: u32,
    },
}

impl Narrow {
    fn takes(self) -> Option<u32> {
        match self {
            Self::Way { takes, .. } => takes,
            Self::Uplink { takes, .. } => Some(takes),
        }
    }
}

/// The narrowest place. A place of unknown MTU counts as the widest.
pub fn narrowest(all: impl IntoIterator<Item = Narrow>) -> Option<Narrow> {
    all.into_iter().min_by_key(|narrow| narrow.takes().unwrap_or(u32::MAX))
}

/// The findings, with one repair for all that have a narrow place. `families` are the families of
/// the network.
pub fn settle(faults: Vec<Fault>, devices: &Devices, families: &[Family]) -> Vec<Finding> {
    let least = Least::new(devices, families);
    let all = || faults.iter().filter_map(|fault| fault.narrow);
    let unknown = all().any(|narrow| narrow.takes().is_none());
    let remedy = narrowest(all()).map(|narrow| remedy(narrow, unknown, devices, &least));
    faults
        .into_iter()
        .map(|Fault { mut finding, narrow }| {
            let Some(narrow) = narrow else { return finding };
            if let Some(takes) = narrow.takes().filter(|takes| *takes < least.bytes) {
                finding.text += &format!(": {takes} bytes are too few for {}", least.text);
            }
            finding.remedy.clone_from(&remedy);
            finding
        })
        .collect()
}

/// The minimum MTU that suffices for every family of the network.
struct Least {
    bytes: u32,
    /// `IPv6 through the tunnel, which takes 1350`.
    text: String,
    /// The minimum MTU of IPv6 plus the tunnel's header. Every path of the Internet takes it.
    every_path: u32,
}

impl Least {
    fn new(devices: &Devices, families: &[Family]) -> Self {
        let needs = |family: &Family| family.least_mtu() + devices.overhead(*family);
        let family = families.iter().copied().max_by_key(needs).unwrap_or(Family::V4);
        let bytes = needs(&family);
        let through = if devices.datapath.devices.is_empty() { "" } else { " through the tunnel" };
        // RFC 8200, section 5.
        let every_path = Family::V6.least_mtu() + devices.overhead(family);
        Self { bytes, text: format!("{family}{through}, which takes {bytes}"), every_path }
    }
}

fn remedy(narrow: Narrow, unknown: bool, devices: &Devices, least: &Least) -> Remedy {
    let uplink = devices.uplink.map_or_else(|| "DEVICE".to_owned(), |name| name.to_string());
    let patch = |mtu: u32| Remedy::PatchConfig(format!("{{\"Backend\": {{\"MTU\": {mtu}}}}}"));
    let set_uplink = |mtu: u32| Remedy::run(format!("ip link set {uplink} mtu {mtu}"));
    let kept = |mtu: u32| {
        format!(
            "to keep it over a reboot, change the host's network settings: mtu: {mtu} (netplan), \
             MTUBytes={mtu} (networkd)"
        )
    };
    match (narrow, devices.datapath.devices.is_empty()) {
        (Narrow::Uplink { takes, needed }, _) if takes < least.bytes => set_uplink(needed)
            .remark(format!("{} bytes at least", least.bytes))
            .remark(kept(needed)),
        (Narrow::Way { to, takes: Some(takes) }, _) if takes < least.bytes => {
            Remedy::run(format!("tracepath -n {to}")).remark(format!(
                "the underlay must be repaired: its narrowest link must take {} bytes at least",
                least.bytes
            ))
        }
        (Narrow::Uplink { takes, needed }, false) => patch(takes)
            .remark(format!(
                "if the MTU of {uplink} is a mistake: ip link set {uplink} mtu {needed}"
            ))
            .remark(kept(needed)),
        (Narrow::Way { takes: Some(takes), .. }, false) if unknown => {
            patch(takes).remark("then run the doctor again: the MTU of some paths is not known")
        }
        (Narrow::Way { takes: Some(takes), .. }, false) => patch(takes),
        (Narrow::Way { takes: None, .. }, false) => {
            patch(least.every_path).remark("if the MTU of the path is known, use that")
        }
        (Narrow::Uplink { takes, needed }, true) => Remedy::RestartDaemon
            .remark(format!("then new pods use the {takes} bytes of {uplink}"))
            .remark(format!("if its MTU is a mistake: ip link set {uplink} mtu {needed}"))
            .remark(kept(needed)),
        (Narrow::Way { to, takes: Some(takes) }, true) => set_uplink(takes)
            .remark(format!(
                "on every node, unless the link that tracepath -n {to} shows can take more"
            ))
            .remark(kept(takes)),
        (Narrow::Way { to, takes: None }, true) => Remedy::run(format!("tracepath -n {to}"))
            .remark(
                "raise the MTU of the narrowest link, or lower the MTU of every node's external \
             interface",
            ),
    }
}

#[cfg(test)]
mod tests {
    use flannel_core::address::Dual;

    use super::*;
    use crate::finding::Check;
    use crate::fixture::devices as vxlan_devices;

    const BOTH: [Family; 2] = Family::BOTH;

    fn way(n: u8, takes: Option<u32>) -> Fault {
        let to = IpAddr::from([192, 0, 2, n]);
        Fault::new(Finding::error(Check::PathMtu, format!("peer {n}")), Narrow::Way { to, takes })
    }

    fn devices(tunnels: Dual<&str>) -> Devices {
        let uplink = Some("eth0".parse().unwrap());
        let mut devices = Devices { uplink, mtu: Some(1450), ..vxlan_devices() };
        devices.datapath.devices = tunnels.map(|_, name| name.parse().unwrap());
        devices
    }

    fn repairs(faults: Vec<Fault>, devices: &Devices, families: &[Family]) -> Vec<String> {
        settle(faults, devices, families)
            .into_iter()
            .map(|f| f.repair().unwrap_or_default())
            .collect()
    }

    #[test]
    fn all_narrow_paths_have_one_repair() {
        let four = devices(Dual { v4: Some("flannel.1"), v6: None });
        let patch =
            |mtu: u32| format!("flannelctl config patch '{{\"Backend\": {{\"MTU\": {mtu}}}}}'");
        let faults = || vec![way(7, Some(1400)), way(8, Some(1300)), way(9, Some(1450))];
        assert_eq!(repairs(faults(), &four, &[Family::V4]), vec![patch(1300); 3]);
        // An unknown MTU is mentioned, but does not decide.
        let some = [faults(), vec![way(10, None)]].concat();
        let again = format!(
            "{} # then run the doctor again: the MTU of some paths is not known",
            patch(1300)
        );
        assert_eq!(repairs(some, &four, &[Family::V4]), vec![again; 4]);
        let guess = " # if the MTU of the path is known, use that";
        assert_eq!(repairs(vec![way(7, None)], &four, &[Family::V4]), [patch(1330) + guess]);
        let both = devices(Dual { v4: Some("flannel.1"), v6: Some("flannel-v6.1") });
        assert_eq!(repairs(vec![way(7, None)], &both, &BOTH), [patch(1350) + guess]);
        // Other findings keep their own repair.
        let other = Finding::error(Check::Tunnel, "x").with_command("y");
        assert_eq!(
            repairs(vec![other.into(), way(7, Some(1400))], &four, &[Family::V4]),
            ["y".to_owned(), patch(1400)]
        );
    }

    #[test]
    fn no_mtu_is_lowered_below_the_minimum_of_the_families() {
        let both = devices(Dual { v4: Some("flannel.1"), v6: Some("flannel-v6.1") });
        let six = devices(Dual { v4: None, v6: Some("flannel-v6.1") });
        let four = devices(Dual { v4: Some("flannel.1"), v6: None });
        let bare = devices(Dual::default());
        for (devices, families, least) in [
            (&both, &BOTH[..], 1350),
            (&six, &BOTH[1..], 1350),
            (&four, &BOTH[..1], 118),
            (&bare, &BOTH[..], 1280),
        ] {
            for takes in [least - 1, least] {
                let found =
                    settle(vec![way(7, Some(takes)), way(8, Some(1400))], devices, families);
                let text = &found[0].text;
                let repair = found[0].repair().unwrap();
                assert_eq!(Some(&repair), found[1].repair().as_ref());
                assert_eq!(found[1].text, "peer 8");
                let too_few = text.contains(&format!("{takes} bytes are too few for IPv"));
                assert_eq!(too_few, takes < least, "{text}");
                let names_the_underlay = format!("must take {least} bytes at least");
                assert_eq!(
                    repair.starts_with("tracepath -n 192.0.2.7 #")
                        && repair.ends_with(&names_the_underlay),
                    too_few,
                    "{repair}"
                );
                assert!(too_few || repair.contains(&takes.to_string()), "{repair}");
            }
        }
        // This host's own interface.
        let own = |takes| {
            let narrow = Narrow::Uplink { takes, needed: 1500 };
            repairs(vec![Fault::new(Finding::error(Check::Mtu, "x"), narrow)], &both, &BOTH)
                .remove(0)
        };
        assert!(
            own(1349).starts_with("ip link set eth0 mtu 1500 # 1350 bytes at least; to keep"),
            "{}",
            own(1349)
        );
        assert!(
            own(1350).starts_with(
                "flannelctl config patch '{\"Backend\": {\"MTU\": 1350}}' # if the MTU"
            ),
            "{}",
            own(1350)
        );
    }
}
