//! `flannelctl cleanup`: takes back what a daemon put into the kernel.

use flannel_core::{Config, cleanup as remove, ready_for_go};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::iface::Selectors;
use serde_json::json;

use super::client::Client;
use super::options::{CleanupFlags, Global};
use super::{Failure, Result, Said, offline};
use crate::backends;
use crate::report::VERSION;
use crate::state;

/// Removes, or makes fit for Go flannel, or says what would be done.
pub(crate) async fn cleanup(client: &Client, global: &Global, flags: &CleanupFlags) -> Result<Said> {
    let mut _alone = None;
    if !flags.dry_run {
        client.nobody_listens()?;
        // A daemon may have no socket, or another one. Where none ever ran there is nothing to lock.
        if global.state_dir.exists() {
            _alone = Some(state::lock(&global.state_dir)?);
        }
    }
    let config = offline::config(global).await?;
    let kernel = NetlinkKernel::open()?;
    let uplink = uplink(&kernel, &config, &flags.iface)?;
    let owned = backends::find(&config.backend.kind)?.owned(uplink, &config)?;
    let work = if flags.for_go { ready_for_go } else { remove };
    let report = work(&kernel, &owned, flags.dry_run)?;
    let value = json!({
        "version": VERSION,
        "dry_run": flags.dry_run,
        "done": report.done.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "failed": report
            .failed
            .iter()
            .map(|(change, error)| json!({ "change": change.to_string(), "error": error.to_string() }))
            .collect::<Vec<_>>(),
    });
    let mut text: String = report.done.iter().map(|change| format!("{change}\n")).collect();
    for (change, error) in &report.failed {
        text += &format!("FAILED: {change}: {error}\n");
    }
    let (verb, count) = (if flags.dry_run { "would be made" } else { "made" }, report.done.len());
    text += &match (count, report.failed.len()) {
        (0, 0) => "nothing of flannel's is there to change\n".to_owned(),
        (_, 0) => format!("{count} changes {verb}\n"),
        (_, failed) => format!("{count} changes {verb}, {failed} failed\n"),
    };
    Ok(Said { text, value, ok: report.failed.is_empty() })
}

/// The interface that the daemon used, as far as it can be told: the one that it would choose now.
fn uplink(kernel: &NetlinkKernel, config: &Config, given: &[String]) -> Result<flannel_core::LinkName> {
    let iface = given.iter().filter(|name| !name.is_empty()).cloned().collect();
    let selectors = Selectors { iface, ..Selectors::default() };
    let chosen = kernel.external_interface(&selectors, config.networks.families());
    let chosen = chosen.map_err(|error| {
        Failure::Refused(format!("{error} (--iface names the interface that the daemon used)"))
    })?;
    Ok(chosen.name)
}
