#![doc = include_str!("../README.md")]

pub mod commands;
mod options;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use crate::commands::{Keepers, Limits, Names, Of, Task};
use async_trait::async_trait;
use flannel_core::address::{Dual, Family};
use flannel_core::backend::{Blueprint, Datapath, ExternalInterface, Node, Prepared};
use flannel_core::kernel::{Footprint, RecordKeeper};
use flannel_core::lease::Offer;
use flannel_core::object::{LinkName, Object};
use flannel_core::runtime::{blocking, lock};
use flannel_core::status::Rejection;
use flannel_core::{Backend, Config, Error, Result, Subnet, Subnets};

use crate::options::Options;

/// The backend type, and the name of the keeper and of its directory in the state directory.
const NAME: &str = "extension";
const NAMES: Names = Names {
    keeper: NAME,
    node: ["PostStartupCommand", "ShutdownCommand"],
    peer: ["SubnetAddCommand", "SubnetRemoveCommand"],
};
/// The most bytes of a node's data.
const MOST_DATA: usize = 65_536;

/// The backend `extension`: runs commands of the config for this node and for every peer.
///
/// **Source**: flannel `pkg/backend/extension`, since v0.28.2.
#[derive(Debug, Default)]
pub struct Extension {
    record_keepers: Keepers,
    /// The outputs of `PreStartupCommand`, which runs once.
    outputs: Mutex<BTreeMap<String, String>>,
}

impl Extension {
    /// The backend, without record keepers.
    pub const fn new() -> Self {
        Self { record_keepers: Keepers::new(), outputs: Mutex::new(BTreeMap::new()) }
    }
}

#[async_trait]
impl Backend for Extension {
    fn kind(&self) -> &'static str {
        NAME
    }

    fn option_names(&self) -> Option<&'static [&'static str]> {
        Some(&Options::NAMES)
    }

    fn runs_commands(&self) -> bool {
        true
    }

    fn datapath(&self, _: &Config) -> Result<Datapath> {
        let mut datapath = Datapath::default();
        // It is not known how packets travel.
        datapath.bare = true;
        Ok(datapath)
    }

    fn footprint(&self, config: &Config, uplink: Option<LinkName>) -> Result<Footprint> {
        Ok(Footprint {
            record_keepers: [NAME].into(),
            // Routes of commands have another protocol, and stay.
            ..Footprint::of_routes(config, uplink)
        })
    }

    fn record_keepers(&self, state_dir: Option<&Path>) -> Vec<Arc<dyn RecordKeeper>> {
        vec![Arc::new(self.record_keepers.keeper(NAMES, state_dir.map(|dir| dir.join(NAME))))]
    }

    fn validate(&self, config: &Config, uplink: Option<&ExternalInterface>) -> Result<()> {
        let options = Options::parse(config)?;
        if uplink.is_some() { options.check_programs() } else { Ok(()) }
    }

    async fn prepare(&self, node: &Node<'_>, config: &Config) -> Result<Prepared> {
        let options = Options::parse(config)?;
        let data = self.output_of_pre_startup(&options).await?;
        let public = node.uplink.address;
        let data = Dual { v4: data.map(|text| json(&text).into()), v6: None };
        let offer = Offer::new(public).with_data(data);
        let footprint = self.footprint(config, Some(node.uplink.name))?;
        let mtu = node.uplink.mtu;
        let networks: Dual<Subnet> = config.pod_networks().collect();
        Ok(Prepared::new(offer, move |lease| {
            let own = lease.lease().subnets;
            let is_held = lease.held().is_some();
            let of_node = options.of_node(&own, &public, &networks).filter(|_| is_held);
            let waits = of_node.is_some();
            let mut blueprint = Blueprint::new(mtu, move |subnets, offer, _, objects| {
                // The plan also runs for this node's own lease.
                if *subnets != own {
                    objects.push(record(subnets, &options.of_peer(subnets, offer, waits)?));
                }
                Ok(())
            });
            blueprint.footprint = footprint;
            if let Some(task) = of_node {
                blueprint.base.insert(record(&own, &task));
            }
            Ok(blueprint)
        }))
    }
}

impl Extension {
    /// The trimmed output of `PreStartupCommand`, or `None` if the option is not set.
    async fn output_of_pre_startup(&self, options: &Options) -> Result<Option<String>> {
        let Some(words) = options.pre_startup.clone() else { return Ok(None) };
        let key = json(&words);
        let known = lock(&self.outputs).get(&key).cloned();
        if known.is_some() {
            return Ok(known);
        }
        let failed = |why: String| refuse(format!("PreStartupCommand: {why}"));
        let time = options.timeout();
        let result = blocking(move || {
            let limits = Limits { time, output: MOST_DATA, stopped: &AtomicBool::new(false) };
            words.run(&BTreeMap::new(), "", limits)
        });
        let output = result.await.map_err(|error| failed(error.to_string()))?;
        if output.is_cut {
            return Err(failed(format!("its output has more than {MOST_DATA} bytes")));
        }
        let text = output.text();
        // Peers measure the JSON text.
        if json(&text).len() > MOST_DATA {
            return Err(failed(format!("its output has more than {MOST_DATA} bytes as JSON")));
        }
        lock(&self.outputs).insert(key, text.clone());
        Ok(Some(text))
    }
}

impl Options {
    /// The commands for this node.
    fn of_node(
        &self,
        own: &Subnets,
        public: &Dual<IpAddr>,
        networks: &Dual<Subnet>,
    ) -> Option<Task> {
        let mut variables = variables(own, public);
        for (name, network) in [("NETWORK", networks.v4), ("IPV6NETWORK", networks.v6)] {
            let network = network.map(|network| network.to_string()).unwrap_or_default();
            variables.insert(name.to_owned(), network);
        }
        self.has_node_commands().then(|| Task {
            of: Of::Node,
            variables,
            input: String::new(),
            add: self.post_startup.clone(),
            remove: self.shutdown.clone(),
            timeout: self.timeout().as_secs(),
            waits: false,
        })
    }

    /// The commands for a peer.
    fn of_peer(
        &self,
        subnets: &Subnets,
        offer: &Offer,
        waits: bool,
    ) -> std::result::Result<Task, Rejection> {
        let input = match offer.data.v4.as_deref() {
            None | Some("null") => String::new(),
            Some(data) if data.len() > MOST_DATA => {
                let why = format!("its backend data has more than {MOST_DATA} bytes");
                return Err(Rejection::Rejected(why));
            }
            Some(data) => serde_json::from_str(data)
                .map_err(|_| Rejection::Rejected("its backend data is not a JSON string".into()))?,
        };
        Ok(Task {
            of: Of::Peer,
            variables: variables(subnets, &offer.public),
            input,
            add: self.subnet_add.clone(),
            remove: self.subnet_remove.clone(),
            timeout: self.timeout().as_secs(),
            waits,
        })
    }

    fn has_node_commands(&self) -> bool {
        self.post_startup.is_some() || self.shutdown.is_some()
    }
}

/// The record of a task. Its key is the first of the subnets.
fn record(subnets: &Subnets, task: &Task) -> Object {
    let first = subnets.iter().next().expect("a lease has a subnet");
    task.record(NAME, first).into()
}

/// `SUBNET`, `IPV6SUBNET`, `PUBLIC_IP` and `PUBLIC_IPV6`. A variable without a value is empty.
fn variables(subnets: &Subnets, public: &Dual<IpAddr>) -> BTreeMap<String, String> {
    let subnet =
        |family| subnets.family(family).map(|subnet| subnet.to_string()).unwrap_or_default();
    let address =
        |family| public[family].map(|address: IpAddr| address.to_string()).unwrap_or_default();
    [
        ("SUBNET".to_owned(), subnet(Family::V4)),
        ("IPV6SUBNET".to_owned(), subnet(Family::V6)),
        ("PUBLIC_IP".to_owned(), address(Family::V4)),
        ("PUBLIC_IPV6".to_owned(), address(Family::V6)),
    ]
    .into()
}

fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("a string or an array of strings has a JSON form")
}

fn refuse(reason: String) -> Error {
    Error::Backend { backend: NAME.into(), reason }
}
