//! Rules in iptables, through `iptables-save` and `iptables-restore`.
//!
//! The kernel reports no changes of iptables. So `iptables-save` is run once per family and period,
//! and `iptables-restore` only for differences.

pub(crate) mod program;
pub(crate) mod script;

use flannel_core::address::{Dual, Family};

use self::program::{Programs, Tool, Variant};
use self::script::script;
use crate::error::Error;
use crate::nft;
use crate::rules::{RuleOptions, Rules};
use crate::status::{Cleanup, Deviation};

/// The number of attempts for a script, which fails if the rules changed since they were read.
const TRIES: usize = 3;

/// The iptables of the host, in the network namespace of the thread that starts the programs.
#[derive(Debug)]
pub(crate) struct Iptables {
    programs: Programs,
    tools: Dual<Tool>,
    /// `Some` for families in which this value may have written rules.
    filled: Dual<()>,
}

impl Iptables {
    /// Finds the programs and checks that they may change the rules that `rule_options` asks for.
    pub(crate) async fn open(programs: Programs, rule_options: RuleOptions) -> Result<Self, Error> {
        let (v4, v6) = (programs.find(Family::V4), programs.find(Family::V6));
        let mut tools = match (v4, v6) {
            (Err(error), Err(_)) => return Err(error),
            (v4, v6) => Dual { v4: v4.ok(), v6: v6.ok() },
        };
        for family in Family::BOTH {
            if let Some(tool) = &mut tools[family] {
                tool.probe(&script::tables(rule_options)).await?;
                break;
            }
        }
        Ok(Self { programs, tools, filled: Dual::default() })
    }

    /// Makes the rules equal to `rules`. Returns the differences, and the failures.
    ///
    /// A family without desired or earlier rules is skipped. [`Iptables::clean`] handles it.
    pub(crate) async fn reconcile(&mut self, rules: &Rules) -> (Vec<Deviation>, Vec<Error>) {
        let (mut deviations, mut failed) = (Vec::new(), Vec::new());
        for family in Family::BOTH {
            // A failure of one family does not affect the other.
            match self.reconcile_family(rules, family).await {
                Ok(differed) => deviations.extend(differed),
                Err(error) => failed.push(error),
            }
        }
        (deviations, failed)
    }

    async fn reconcile_family(
        &mut self,
        rules: &Rules,
        family: Family,
    ) -> Result<Vec<Deviation>, Error> {
        let desired = rules.has(family);
        if !desired && self.filled[family].is_none() {
            return Ok(Vec::new());
        }
        let tool = match &mut self.tools[family] {
            Some(tool) => tool,
            unknown => unknown.insert(self.programs.find(family)?),
        };
        // Set first, because a failed or dropped call may have written rules.
        self.filled[family] = Some(());
        let deviations = reconcile(tool, rules, family, true).await?;
        self.filled[family] = desired.then_some(());
        Ok(deviations)
    }

    /// Finds flannel's rules, except those that `except` keeps, and removes them if `write` is
    /// true. A missing program is a failure if flannel may have rules that only it can read.
    pub(crate) async fn clean(
        programs: &Programs,
        mut except: Option<&mut Self>,
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
                        reconcile(&mut tool, &Rules::default(), family, write).await
                    }
                    Err(error) => Err(error),
                });
            }
            cleanup.failed.extend(out_of_reach(family, &done).err());
        }
        cleanup
    }
}

/// Checks the parts of the kernel that no variant in `reached` can read: that `iptables-nft` has no
/// chain of flannel, and that no legacy table of flannel's is in use.
fn out_of_reach(family: Family, reached: &[Variant]) -> Result<(), Error> {
    if !reached.contains(&Variant::Nft) {
        let chains = nft::chains_of_iptables(family)?;
        if !chains.is_empty() {
            return Err(Error::Leftovers { chains: chains.join(", ") });
        }
    }
    if !reached.contains(&Variant::Legacy) {
        let ours = |name: &String| script::chains().any(|(table, _)| table == name);
        let tables: Vec<String> = legacy_tables(family).into_iter().filter(ours).collect();
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
    write: bool,
) -> Result<Vec<Deviation>, Error> {
    let mut tries = TRIES;
    loop {
        let random = !rules.has(family) || tool.is_modern().await?;
        let script = script(&tool.save().await?, rules, family, random, &tool.name);
        if script.text.is_empty() || !write {
            return Ok(script.deviations);
        }
        tracing::debug!(program = tool.name, script = script.text, "writing rules");
        tries -= 1;
        match tool.restore(&script.text).await {
            Ok(()) => return Ok(script.deviations),
            // Another program may have removed a rule that the script deletes.
            Err(error) if tries > 0 => {
                tracing::debug!(%error, "the rules are read again");
            }
            Err(error) => return Err(error),
        }
    }
}
