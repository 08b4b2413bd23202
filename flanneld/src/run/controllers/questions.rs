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
            network.starter.try_out(&network.validator, to, Purpose::Question).await?;
            let datapath = network.backends.target.datapath(to)?;
            Ok(reduced_mtu(&datapath, &network.uplink.iface).into_iter().collect())
        };
        match network.observer.answer_trials(ask).await {}
    }
}
