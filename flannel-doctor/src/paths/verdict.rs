//! Derives the state of a path from the answers of one probe; pure.

use std::time::Duration;

use flannel_api::PathState;

use crate::inputs::echo::EchoResult;

/// The answers to the echoes of one probe. Those for packets of pods are at the tunnel address, or
/// without a tunnel at the public address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EchoReplies {
    /// The small echo at the address of packets of pods.
    pub(crate) small: EchoResult,
    /// The echo of full size at that address.
    pub(crate) full: EchoResult,
    /// The small echo at the public address; `None` without a tunnel, or without such an address.
    pub(crate) public: Option<EchoResult>,
    /// The echo of the size of the route's lowered MTU; `None` without one.
    pub(crate) lowered: Option<EchoResult>,
}

impl EchoReplies {
    /// Whether an address of the peer replied.
    pub(crate) fn has_reply(&self) -> bool {
        [Some(&self.small), Some(&self.full), self.public.as_ref()]
            .into_iter()
            .flatten()
            .any(replied)
    }

    /// The round trip of the small echo.
    pub(crate) fn round_trip(&self) -> Option<Duration> {
        if let EchoResult::Reply(took) = self.small { Some(took) } else { None }
    }

    /// Whether small packets pass, and packets of the size of the route's lowered MTU are lost.
    pub(crate) fn lowered_is_lost(&self) -> bool {
        replied(&self.small) && self.lowered.as_ref().is_some_and(|answer| !replied(answer))
    }

    /// The fault that the answers show, or `None` if packets of pods pass.
    pub(crate) fn fault(&self) -> Option<Fault> {
        match (replied(&self.small), replied(&self.full), &self.public) {
            (true, true, _) => None,
            (true, false, _) => Some(Fault::FullSizeLost),
            (false, _, Some(public)) if replied(public) => Some(Fault::TunnelBlocked),
            (false, _, public) => {
                // This host has no route to the node, or cannot send at all.
                let unsent =
                    matches!(public.as_ref().unwrap_or(&self.small), EchoResult::NotSent(_));
                Some(if unsent { Fault::UnderlayDown } else { Fault::Silent })
            }
        }
    }
}

fn replied(answer: &EchoResult) -> bool {
    matches!(answer, EchoResult::Reply(_))
}

/// A fault of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// No address of the node replies: the node is down, or if no node replies, the underlay.
    Silent,
    /// Packets to the public address of the node cannot be sent.
    UnderlayDown,
    /// The public address replies, the tunnel address does not.
    TunnelBlocked,
    /// The public address replies, the tunnel address does not, and the node's daemon reports that
    /// packets through the tunnel arrive there.
    OneWay,
    /// Small packets pass, packets of full size do not.
    FullSizeLost,
}

impl Fault {
    /// Whether this fault, which an examination found, explains one that echoes show.
    pub(crate) fn refines(self, of_echoes: Self) -> bool {
        self == Self::OneWay && of_echoes == Self::TunnelBlocked
    }

    /// The state of a path with this fault. `any_reply`: another node replies.
    pub(crate) fn state(self, any_reply: bool) -> PathState {
        match self {
            Self::Silent if any_reply => PathState::NodeDown,
            Self::Silent | Self::UnderlayDown => PathState::UnderlayDown,
            Self::TunnelBlocked => PathState::TunnelBlocked,
            Self::OneWay => PathState::OneWay,
            Self::FullSizeLost => PathState::FullSizeLost,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_told_apart() {
        let reply = || EchoResult::Reply(Duration::from_millis(1));
        let lost = || EchoResult::Nothing;
        let unsent = || EchoResult::NotSent("unreachable".to_owned());
        for (small, full, public, fault) in [
            (reply(), reply(), Some(reply()), None),
            (reply(), reply(), Some(lost()), None),
            (reply(), reply(), None, None),
            (reply(), lost(), Some(reply()), Some(Fault::FullSizeLost)),
            (reply(), EchoResult::TooBig(Some(1400)), Some(reply()), Some(Fault::FullSizeLost)),
            (lost(), lost(), Some(reply()), Some(Fault::TunnelBlocked)),
            (unsent(), unsent(), Some(reply()), Some(Fault::TunnelBlocked)),
            (lost(), lost(), Some(lost()), Some(Fault::Silent)),
            (lost(), lost(), None, Some(Fault::Silent)),
            (lost(), lost(), Some(unsent()), Some(Fault::UnderlayDown)),
            (unsent(), unsent(), None, Some(Fault::UnderlayDown)),
        ] {
            let answers = EchoReplies { small, full, public, lowered: None };
            assert_eq!(answers.fault(), fault, "{answers:?}");
        }
    }

    #[test]
    fn a_silent_node_among_others_is_down() {
        assert_eq!(Fault::Silent.state(true), PathState::NodeDown);
        assert_eq!(Fault::Silent.state(false), PathState::UnderlayDown);
    }
}
