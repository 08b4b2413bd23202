//! Configs: the plugin's, flanneld's `subnet.env`, and the delegate's, which is made of both.

pub(crate) mod delegate_conf;
pub(crate) mod net_conf;
pub(crate) mod subnet_env;
