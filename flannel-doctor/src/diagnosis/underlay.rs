//! The fault of this host's own network.

use flannel_core::Remedy;

use crate::finding::{Check, Finding};
use crate::inputs::devices::Devices;
use crate::inputs::echo::EchoResult;
use crate::inputs::query::PeerResults;

/// The fault if the external interface is down, or if none of two or more `peers` replies. The
/// silence of one peer says nothing about this host.
pub(crate) fn underlay(
    answers: &[PeerResults],
    peers: usize,
    devices: &Devices,
) -> Option<Finding> {
    let uplink = devices.uplink?;
    if devices.uplink_down {
        let text = format!("the external interface {uplink} is down");
        let repair = format!("ip link set {uplink} up");
        return Some(Finding::error(Check::Underlay, text).with_command(repair));
    }
    if peers < 2 || answers.is_empty() || !answers.iter().all(is_silent) {
        return None;
    }
    let text = format!(
        "no node replies, at any address: the network of this host ({uplink}) or the way to all \
         nodes is broken"
    );
    let remedy = Remedy::run(format!("ip -s link show {uplink}"))
        .remark("has it a carrier, and does it receive packets?");
    Some(Finding::error(Check::Underlay, text).with_remedy(remedy))
}

/// Whether the peer was asked, and sent nothing.
fn is_silent(PeerResults { echoes, path, handshake, .. }: &PeerResults) -> bool {
    handshake.as_ref().is_none_or(|handshake| !handshake.is_alive())
        && path.segments.is_none()
        && path.acknowledged == 0
        && !echoes.is_empty()
        && echoes
            .iter()
            .all(|(_, answer)| matches!(answer, EchoResult::Nothing | EchoResult::NotSent(_)))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::inputs::echo::Probe;
    use crate::path_probe::client::PathProbe;

    fn answers(answer: EchoResult) -> PeerResults {
        let probe = Probe { to: [192, 0, 2, 7].into(), size: 64 };
        PeerResults {
            echoes: vec![(probe, answer)],
            path: PathProbe::default(),
            passes: None,
            handshake: None,
        }
    }

    #[test]
    fn the_silence_of_all_peers_is_a_fault_of_this_host_and_that_of_one_is_not() {
        let devices = Devices { uplink: "eth0".parse().ok(), ..Devices::default() };
        let silent = || answers(EchoResult::Nothing);
        let found = |answers: &[PeerResults], peers| underlay(answers, peers, &devices).is_some();
        assert!(found(&[silent(), silent()], 2));
        // One peer, in two families.
        assert!(!found(&[silent(), silent()], 1));
        assert!(!found(&[silent(), answers(EchoResult::Reply(Duration::ZERO))], 2));
        // Nobody was asked.
        assert!(!found(&[silent(), answers(EchoResult::NotAllowed)], 2));
        assert!(!found(&[], 2));
        let down = Devices { uplink_down: true, ..devices.clone() };
        let finding = underlay(&[], 0, &down).unwrap();
        assert_eq!(finding.repair().as_deref(), Some("ip link set eth0 up"));
    }
}
