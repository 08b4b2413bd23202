//! Questions of users whether a network could be built from another config.

use flannel_core::Config;

use super::Ended;
use crate::report::problems::reduced_mtu;
use crate::run::network::RunningNetwork;
use crate::run::start::Purpose;

/// Answers the questions.
pub(crate) struct QuestionController<'a> {
    pub(crate) network: &'a RunningNetwork<'a>,
}

impl QuestionController<'_> {
    /// Runs until it is dropped.
    pub(crate) async fn run(self) -> Ended {
        let network = self.network;
        let ask = async |to: &Config| {
            let purpose = Purpose::Question;
            let iface = network.starter.try_out(&network.validator, to, purpose).await?;
            let datapath = network.settings.backends.datapath(to);
            Ok(reduced_mtu(&datapath, &iface).into_iter().collect())
        };
        match network.observer.answer_trials(ask).await {}
    }
}
