//! Rules in iptables, through `iptables-save` and `iptables-restore`.
//!
//! `iptables-save` is run once per family after a change of the rules or of the desired rules, and
//! `iptables-restore` only for differences.

pub(crate) mod program;
pub(crate) mod saved;
pub(crate) mod script;
mod watch;

use std::time::Duration;

use flannel_core::address::{Dual, Family};
use tokio::time::Instant;

use self::program::{Programs, Tool, Variant};
use self::script::{Scope, Target, script};
use self::watch::Watch;
use crate::error::Error;
use crate::nft;
use crate::rules::{RuleOptions, Rules};
use crate::status::{Check, Cleanup, Deviation};

/// The number of attempts for a script, which fails if the rules changed since they were read.
const TRIES: usize = 3;
/// The time after which rules are read again whose changes may go unseen.
const UNSEEN: Duration = Duration::from_secs(300);

/// The iptables of the host, in the network namespace of the thread that starts the programs.
pub(crate) struct Iptables {
    programs: Programs,
    tools: Dual<Tool>,
    /// `Some` for families in which this value may have written rules.
    filled: Dual<()>,
    watch: Watch,
    /// The last check. `None` if the rules may have changed since then, or their changes cannot be
    /// watched.
    known: Option<Known>,
}

/// The rules that were in place at a check, and its time.
struct Known {
    rules: Rules,
    at: Instant,
}

impl Iptables {
    /// Finds the programs and checks that they may change the rules that `rule_options` asks for.
    pub(crate) async fn open(
        programs: Programs,
        rule_options: &RuleOptions,
    ) -> Result<Self, Error> {
        // The programs of one family are enough.
        let mut tools = match (programs.find(Family::V4), programs.find(Family::V6)) {
            (Err(error), Err(_)) => return Err(error),
            (v4, v6) => Dual { v4: v4.ok(), v6: v6.ok() },
        };
        for family in Family::BOTH {
            if let Some(tool) = &mut tools[family] {
                tool.probe(&script::tables(rule_options)).await?;
                break;
            }
        }
        Ok(Self { programs, tools, filled: Dual::default(), watch: Watch::default(), known: None })
    }

    /// Makes the rules equal to `rules`. Returns the differences, and the failures. Runs no program
    /// if these rules were in place and no change was noticed since then.
    ///
    /// A family without desired or earlier rules is skipped. [`Iptables::clean`] handles it.
    pub(crate) async fn reconcile(&mut self, rules: &Rules) -> Check {
        let mut check = Check::default();
        if let Some(known) = &self.known
            && known.rules == *rules
            && (self.watch.is_exact() || known.at.elapsed() < UNSEEN)
        {
            return check;
        }
        self.known = None;
        let mut is_watched = true;
        for family in Family::BOTH {
            // A failure of one family does not affect the other.
            check.note(self.reconcile_family(rules, family, &mut is_watched).await);
        }
        if is_watched && check.failed.is_empty() {
            self.known = Some(Known { rules: rules.clone(), at: Instant::now() });
        }
        check
    }

    /// Waits for a change that another program may have made. The next check reads the rules.
    ///
    /// # Cancel safety
    /// No change is lost.
    pub(crate) async fn disturbed(&mut self) {
        self.watch.changed().await;
        self.known = None;
    }

    async fn reconcile_family(
        &mut self,
        rules: &Rules,
        family: Family,
        is_watched: &mut bool,
    ) -> Result<Vec<Deviation>, Error> {
        let desired = rules.has(family);
        if !desired && self.filled[family].is_none() {
            return Ok(Vec::new());
        }
        let tool = match &mut self.tools[family] {
            Some(tool) => tool,
            unknown => unknown.insert(self.programs.find(family)?),
        };
        // A change after this and before the rules are read causes one more check.
        *is_watched &= self.watch.cover(tool.variant().await?, &self.programs.lock());
        // Set first, because a failed or dropped call may have written rules.
        self.filled[family] = Some(());
        let deviations = reconcile(tool, rules, family, Scope::All, true).await?;
        self.filled[family] = desired.then_some(());
        Ok(deviations)
    }

    /// Finds the rules in `scope` that `none`, which has no rules, owns, except those that `except`
    /// keeps, and removes them if `write` is true. A missing program is a failure if flannel may
    /// have rules that only it can read.
    pub(crate) async fn clean(
        programs: &Programs,
        mut except: Option<&mut Self>,
        none: &Rules,
        scope: Scope,
        write: bool,
    ) -> Cleanup {
        let mut cleanup = Cleanup::default();
        for family in Family::BOTH {
            let mut done = Vec::new();
            let used = except.as_mut().filter(|used| used.filled[family].is_some());
            if let Some(tool) = used.and_then(|used| used.tools[family].as_mut()) {
                match tool.variant().await {
                    Ok(variant) => done.push(variant),
                    Err(error) => {
                        cleanup.failed.push(error);
                        continue;
                    }
                }
            }
            for mut tool in programs.find_all(family) {
                cleanup.note(match tool.variant().await {
                    Ok(variant) if done.contains(&variant) => continue,
                    Ok(variant) => {
                        done.push(variant);
                        reconcile(&mut tool, none, family, scope, write).await
                    }
                    Err(error) => Err(error),
                });
            }
            cleanup.failed.extend(out_of_reach(family, scope, &done).err());
        }
        cleanup
    }
}

/// Checks the parts of the kernel that no variant in `reached` can read. An error if `iptables-nft`
/// has a chain of flannel, or if a legacy table that flannel uses exists.
fn out_of_reach(family: Family, scope: Scope, reached: &[Variant]) -> Result<(), Error> {
    if !reached.contains(&Variant::Nft) {
        let chains = nft::chains_of_iptables(family, scope)?;
        if !chains.is_empty() {
            return Err(Error::Leftovers { chains: chains.join(", ") });
        }
    }
    if !reached.contains(&Variant::Legacy) {
        let mut tables = legacy_tables(family);
        tables.retain(|name| script::chains(scope).any(|(table, _)| table == name));
        if !tables.is_empty() {
            return Err(Error::Unseen { family, tables: tables.join(", ") });
        }
    }
    Ok(())
}

/// The legacy tables that the kernel has in this network namespace.
pub(crate) fn legacy_tables(family: Family) -> Vec<String> {
    let file = if family == Family::V4 { "ip_tables_names" } else { "ip6_tables_names" };
    let names =
        std::fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap_or_default();
    names.lines().map(str::to_owned).collect()
}

async fn reconcile(
    tool: &mut Tool,
    rules: &Rules,
    family: Family,
    scope: Scope,
    write: bool,
) -> Result<Vec<Deviation>, Error> {
    let mut tries = TRIES;
    let mut deviations: Option<Vec<Deviation>> = None;
    let mut placed = Vec::new();
    loop {
        let random_fully = !rules.has(family) || tool.is_modern().await?;
        let saved = tool.save().await?;
        let target = Target { family, scope, random_fully, program: &tool.name, placed: &placed };
        let script = script(&saved, rules, target);
        if script.text.is_empty() || !write {
            return Ok(deviations.unwrap_or(script.deviations));
        }
        tracing::debug!(program = tool.name, script = script.text, "writing rules");
        tries -= 1;
        match tool.restore(&script.text).await {
            // Another program may have inserted a rule since the rules were read.
            Ok(()) if !script.numbered.is_empty() && tries > 0 => {
                deviations.get_or_insert(script.deviations);
                placed = script.numbered;
            }
            Ok(()) => return Ok(deviations.unwrap_or(script.deviations)),
            // Another program may have removed a rule that the script deletes.
            Err(error) if tries > 0 => {
                tracing::debug!(%error, "the rules are read again");
            }
            Err(error) => return Err(error),
        }
    }
}
