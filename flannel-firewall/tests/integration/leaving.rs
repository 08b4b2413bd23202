//! Which rules stay after a start, a stop, a switch of the mode and a cleanup. Foreign rules always
//! stay.

use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::time::Duration;

use crate::fixture::tools::nft;
use crate::fixture::{ALL, Fixture, Kind, Place, Running, rules_of, tools};
use flannel_core::address::{Dual, Family};
use flannel_firewall::{
    Error, Firewall, Options, Programs, RuleOptions, Rules, cleanup, leftovers,
};

/// A period so long that no check in a test is periodic.
const RESYNC: Duration = Duration::from_secs(3600);

in_every_mode!(
    stopping_leaves_the_rules_and_starting_adopts_them,
    switching_removes_the_other_modes_rules,
    cleaning_up_removes_only_rules_of_flannel,
    a_steady_state_runs_no_process,
);

async fn stopping_leaves_the_rules_and_starting_adopts_them(fixture: Fixture, kind: Kind) {
    let running = Running::start(&fixture, kind, rules_of(Place::Pod, ALL), RESYNC).await;
    running.stop().await;
    for family in Family::BOTH {
        fixture.assert_masqueraded(family);
    }
    let running = Running::start(&fixture, kind, rules_of(Place::Pod, ALL), RESYNC).await;
    running.assert_writes(0, 0);
    running.stop().await;
    // The node got another subnet while the firewall was stopped.
    let running = Running::start(&fixture, kind, rules_of(Place::Peer, ALL), RESYNC).await;
    running.assert_writes(1, 0);
    for family in Family::BOTH {
        let seen = fixture.seen(family, Place::Outside, Place::Pod);
        assert_eq!(seen, Some(Place::Pod.node(family)), "{family}");
    }
}

async fn switching_removes_the_other_modes_rules(fixture: Fixture, kind: Kind) {
    fixture.tools.make_foreign();
    let before = fixture.tools.foreign_seen();
    for other in Kind::ALL.into_iter().filter(|other| *other != kind) {
        Running::start(&fixture, other, rules_of(Place::Peer, ALL), RESYNC).await.stop().await;
        assert_ne!(fixture.tools.ours_seen(), Vec::<String>::new());
        // Go flannel's cleanup of the other mode leaves this chain.
        fixture.tools.iptables(Kind::IptablesLegacy, Family::V6, "-t nat -N FLANNEL-FWD");
        let mut running = Running::start(&fixture, kind, rules_of(Place::Pod, ALL), RESYNC).await;
        running.until(|status| status.old_rules_gone).await;
        let ours = fixture.tools.ours_seen();
        assert!(
            ours.iter().all(|line| match kind {
                Kind::Nftables => line.contains("table ip"),
                Kind::IptablesNft | Kind::IptablesLegacy => line.contains(&format!("{kind:?}")),
            }),
            "{other:?} to {kind:?}: {ours:#?}"
        );
        assert_eq!(ours.len(), if kind == Kind::Nftables { 2 } else { 24 }, "{ours:#?}");
        assert_eq!(fixture.tools.foreign_seen(), before, "{other:?} to {kind:?}");
        for family in Family::BOTH {
            fixture.assert_masqueraded(family);
        }
        running.stop().await;
        cleanup(&fixture.tools.programs()).await;
    }
}

async fn cleaning_up_removes_only_rules_of_flannel(fixture: Fixture, kind: Kind) {
    let programs = fixture.tools.programs();
    let nothing = cleanup(&programs).await;
    assert!(nothing.found.is_empty() && nothing.failed.is_empty(), "{nothing:?}");
    fixture.tools.make_foreign();
    let before = fixture.tools.foreign_seen();
    Running::start(&fixture, kind, rules_of(Place::Pod, ALL), RESYNC).await.stop().await;
    let would = leftovers(&programs).await;
    for family in Family::BOTH {
        fixture.assert_masqueraded(family);
    }
    let did = cleanup(&programs).await;
    assert!(did.failed.is_empty(), "{did:?}");
    assert_eq!(would.found, did.found, "the announced rules were removed");
    assert_eq!(did.found.len(), if kind == Kind::Nftables { 2 } else { 4 }, "{did:?}");
    assert_eq!(fixture.tools.ours_seen(), Vec::<String>::new());
    assert_eq!(fixture.tools.foreign_seen(), before);
    assert!(cleanup(&programs).await.found.is_empty());
}

async fn a_steady_state_runs_no_process(fixture: Fixture, kind: Kind) {
    let resync = Duration::from_millis(100);
    let mut running = Running::start(&fixture, kind, rules_of(Place::Pod, ALL), resync).await;
    running.until(|status| status.old_rules_gone).await;
    settled(&fixture, &mut running).await;
    // Changes of other chains, in the same table too.
    fixture.tools.make_foreign();
    nft("table inet noise { chain c { counter; }; }");
    let runs = settled(&fixture, &mut running).await;
    if kind == Kind::IptablesNft {
        fixture.tools.iptables(kind, Family::V4, "-t nat -A FOREIGN -j RETURN");
    }
    let checks = running.status.borrow().checks;
    running.until(|status| status.checks >= checks + 5).await;
    assert_eq!(fixture.tools.runs()[runs..], Vec::<String>::new());
    running.assert_writes(1, 0);
}

/// Waits until five checks in a row run no program. Returns the number of runs until then.
async fn settled(fixture: &Fixture, running: &mut Running) -> usize {
    for _ in 0..20 {
        let checks = running.status.borrow().checks;
        let runs = fixture.tools.runs().len();
        running.until(|status| status.checks >= checks + 5).await;
        if fixture.tools.runs().len() == runs {
            return runs;
        }
    }
    panic!("programs are run all the time: {:?}", fixture.tools.runs());
}

/// `iptables-legacy` creates its lock file again if it is gone.
#[test]
fn changes_are_noticed_after_the_lock_file_was_replaced() {
    flannel_netlink::testing::in_netns_async(|| async {
        let fixture = Fixture::new();
        let kind = Kind::IptablesLegacy;
        let resync = Duration::from_millis(100);
        let mut running = Running::start(&fixture, kind, rules_of(Place::Pod, ALL), resync).await;
        running.until(|status| status.old_rules_gone).await;
        settled(&fixture, &mut running).await;
        std::fs::remove_file(fixture.tools.path("lock")).unwrap();
        for repairs in 1..=2 {
            fixture.tools.iptables(kind, Family::V4, "-t nat -F");
            running.until(|status| status.repairs == repairs).await;
            settled(&fixture, &mut running).await;
        }
    });
}

/// The rules of a network without IPv6.
fn rules_of_ipv4() -> Rules {
    let networks = Dual { v4: "10.1.0.0/16".parse().ok(), v6: None };
    Rules::new(&networks, &Dual::default(), &ALL).unwrap()
}

#[test]
fn only_the_families_with_rules_are_read() {
    flannel_netlink::testing::in_netns_async(|| async {
        let fixture = Fixture::new();
        let mut running = Running::start(
            &fixture,
            Kind::IptablesLegacy,
            rules_of_ipv4(),
            Duration::from_millis(50),
        )
        .await;
        running.until(|status| status.old_rules_gone).await;
        let runs = fixture.tools.runs().len();
        fixture.tools.iptables(Kind::IptablesLegacy, Family::V4, "-t nat -F");
        running.until(|status| status.repairs == 1).await;
        let runs = fixture.tools.runs()[runs..].to_vec();
        assert!(runs.iter().all(|run| run.starts_with("iptables-legacy-")), "{runs:?}");
    });
}

#[test]
fn the_rules_of_a_family_that_is_no_longer_desired_are_removed() {
    flannel_netlink::testing::in_netns_async(|| async {
        let fixture = Fixture::new();
        let only_v4 = rules_of_ipv4().with_former(["fd00:1::/48".parse().unwrap()]);
        for kind in Kind::ALL {
            for while_away in [true, false] {
                let mut running =
                    Running::start(&fixture, kind, rules_of(Place::Pod, ALL), RESYNC).await;
                if while_away {
                    running.stop().await;
                    running = Running::start(&fixture, kind, only_v4.clone(), RESYNC).await;
                    running.until(|status| status.old_rules_gone).await;
                } else {
                    running.want(rules_of_ipv4()).await;
                }
                let ours = fixture.tools.ours_seen();
                assert!(
                    !ours.iter().any(|line| line.contains("IPv6") || line.contains("ip6")),
                    "{kind:?} {while_away}: {ours:#?}"
                );
                assert!(!ours.is_empty());
                running.stop().await;
            }
            cleanup(&fixture.tools.programs()).await;
        }
    });
}

#[test]
fn a_missing_program_is_reported_and_its_return_noticed() {
    flannel_netlink::testing::in_netns_async(|| async {
        let fixture = Fixture::new();
        let resync = Duration::from_millis(20);
        let mut running =
            Running::start(&fixture, Kind::IptablesNft, rules_of(Place::Pod, ALL), resync).await;
        let here = fixture.tools.path("ip6tables-nft-save");
        let gone = fixture.tools.path("gone");
        std::fs::rename(&here, &gone).unwrap();
        fixture.tools.iptables(Kind::IptablesNft, Family::V6, "-t nat -F");
        let status =
            running.until(|status| status.failure.as_ref().is_some_and(|f| f.times >= 3)).await;
        assert!(!status.in_place);
        let error = status.failure.unwrap().errors[0].to_string();
        assert!(error.contains("ip6tables-save"), "{error}");
        // The rules of the other family are still repaired.
        fixture.tools.iptables(Kind::IptablesNft, Family::V4, "-t nat -F");
        running.until(|status| status.repairs == 1).await;
        fixture.assert_masqueraded(Family::V4);
        std::fs::rename(&gone, &here).unwrap();
        let status = running.until(|status| status.in_place).await;
        assert!(status.failure.is_none() && status.changes == 1, "{status:?}");
    });
}

/// Images for Kubernetes have a wrapper script named `iptables` that runs one of the variants.
#[test]
fn the_variant_of_a_wrapper_script_is_known() {
    flannel_netlink::testing::in_netns_async(|| async {
        let fixture = Fixture::new();
        for kind in [Kind::IptablesNft, Kind::IptablesLegacy] {
            fixture.tools.host_has_wrappers_for(kind);
            let options =
                Options { programs: fixture.tools.programs(), resync: Duration::from_millis(50) };
            let mut running = Running::with(kind, rules_of(Place::Pod, ALL), options).await;
            let checks = running.until(|status| status.old_rules_gone).await.checks;
            running.until(|status| status.checks > checks + 1).await;
            running.assert_writes(1, 0);
            assert!(
                fixture.tools.ours_seen().iter().all(|line| line.contains(&format!("{kind:?}")))
            );
            running.stop().await;
        }
    });
}

#[test]
fn a_first_failure_notifies_receivers() {
    flannel_netlink::testing::in_netns_async(|| async {
        let fixture = Fixture::new();
        let options = Options { programs: fixture.tools.programs(), resync: RESYNC };
        let firewall = Firewall::open(Kind::IptablesNft.mode(), &ALL, options).await.unwrap();
        for program in ["iptables-nft-save", "ip6tables-nft-save"] {
            std::fs::remove_file(fixture.tools.path(program)).unwrap();
        }
        let mut status = firewall.status();
        let (_rules, receiver) = tokio::sync::watch::channel(rules_of(Place::Pod, ALL));
        let _running = tokio::spawn(firewall.run(receiver));
        let wait = status.wait_for(|status| status.failure.is_some());
        let status =
            tokio::time::timeout(Duration::from_secs(20), wait).await.expect("notified").unwrap();
        let errors = &status.failure.as_ref().unwrap().errors;
        assert!(matches!(*errors[0], Error::Run { .. }) && errors.len() == 2, "{status:?}");
    });
}

#[test]
fn without_programs_iptables_is_refused_and_nftables_is_not() {
    flannel_netlink::testing::in_netns_async(|| async {
        let empty = tempfile::tempdir().unwrap();
        let programs = Programs { path: Some(empty.path().into()), ..Programs::default() };
        let options = Options { programs, ..Options::default() };
        let error =
            Firewall::open(Kind::IptablesNft.mode(), &ALL, options.clone()).await.unwrap_err();
        assert!(matches!(error, Error::NoProgram { .. }), "{error}");
        let fixture = Fixture::new();
        let before =
            Running::start(&fixture, Kind::IptablesNft, rules_of(Place::Pod, ALL), RESYNC).await;
        before.stop().await;
        let firewall = Firewall::open(Kind::Nftables.mode(), &ALL, options).await.unwrap();
        let mut status = firewall.status();
        let (_rules, receiver) = tokio::sync::watch::channel(rules_of(Place::Pod, ALL));
        let _running = tokio::spawn(firewall.run(receiver));
        let status = status.wait_for(|status| !status.leftovers.is_empty()).await.unwrap().clone();
        assert!(status.in_place && !status.old_rules_gone, "{status:?}");
        for family in Family::BOTH {
            fixture.assert_masqueraded(family);
        }
        let error = status.leftovers[0].to_string();
        assert!(
            error.starts_with("IPv4 chain FLANNEL-POSTRTG in table nat, IPv4 chain FLANNEL-FWD"),
            "{error}"
        );
    });
}

/// kube-proxy holds the lock for seconds on hosts with many services.
#[test]
fn the_lock_of_iptables_is_waited_for() {
    flannel_netlink::testing::in_netns_async(|| async {
        let fixture = Fixture::new();
        fixture.tools.host_uses(Kind::IptablesLegacy);
        let lock = std::fs::File::create(fixture.tools.path("lock")).unwrap();
        lock.lock().unwrap();
        let options = Options { programs: fixture.tools.programs(), resync: RESYNC };
        let mode = Kind::IptablesLegacy.mode();
        let opening = tokio::spawn(async move { Firewall::open(mode, &ALL, options).await });
        let inode = format!(":{} ", lock.metadata().unwrap().ino());
        let waits = || {
            let locks = std::fs::read_to_string("/proc/locks").unwrap();
            locks.lines().any(|line| line.contains("-> FLOCK") && line.contains(&inode))
        };
        let wait = async {
            while !waits() && !opening.is_finished() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), wait).await.expect("it waits or gives up");
        lock.unlock().unwrap();
        opening.await.unwrap().expect("it waits");
        // Newer versions wait without `--wait`; 1.8.7 does not.
        let runs = fixture.tools.runs();
        let probe = runs.iter().find(|run| run.contains("--test")).expect("it was tried");
        assert!(probe.contains("--wait"), "{runs:?}");
    });
}

#[test]
fn only_tables_with_desired_rules_are_probed() {
    flannel_netlink::testing::in_netns_async(|| async {
        let fixture = Fixture::new();
        fixture.tools.host_uses(Kind::IptablesLegacy);
        let options = Options { programs: fixture.tools.programs(), resync: RESYNC };
        Firewall::open(Kind::IptablesLegacy.mode(), &RuleOptions::default(), options)
            .await
            .unwrap();
        let tried = std::fs::read_to_string("/proc/thread-self/net/ip_tables_names").unwrap();
        assert_eq!(tried, "filter\n");
    });
}

#[test]
fn leftovers_that_no_program_can_read_are_reported() {
    for (left, used, expected) in [
        (Kind::IptablesLegacy, Kind::Nftables, "of iptables-legacy: in use"),
        (Kind::IptablesLegacy, Kind::IptablesNft, "of iptables-legacy: in use"),
        (Kind::IptablesNft, Kind::IptablesLegacy, "IPv4 chain FLANNEL-POSTRTG in table nat"),
    ] {
        flannel_netlink::testing::in_netns_async(move || async move {
            let fixture = Fixture::new();
            Running::start(&fixture, left, rules_of(Place::Pod, ALL), RESYNC).await.stop().await;
            for name in ["iptables", "ip6tables"] {
                for role in ["save", "restore"] {
                    let program = format!("{name}{}-{role}", left.suffix());
                    std::fs::remove_file(fixture.tools.path(&program)).unwrap();
                }
            }
            let assert_reported = |errors: Vec<String>| {
                assert!(
                    errors.iter().any(|error| error.contains(expected)),
                    "{left:?} {used:?}: {errors:?}"
                );
            };
            let mut running =
                Running::start(&fixture, used, rules_of(Place::Pod, ALL), RESYNC).await;
            let status = running.until(|status| !status.leftovers.is_empty()).await;
            assert!(status.in_place && !status.old_rules_gone, "{status:?}");
            assert_reported(status.leftovers.iter().map(ToString::to_string).collect());
            running.stop().await;
            let programs = fixture.tools.programs();
            for cleaned in [leftovers(&programs).await, cleanup(&programs).await] {
                assert_reported(cleaned.failed.iter().map(ToString::to_string).collect());
            }
        });
    }
}

/// Set in a process of root that lacks CAP_NET_ADMIN and CAP_NET_RAW.
const WITHOUT: &str = "FLANNEL_FIREWALL_WITHOUT_NET_ADMIN";

#[test]
fn the_error_names_the_missing_privilege() {
    if std::env::var_os(WITHOUT).is_some() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        for kind in Kind::ALL {
            let tools = tools::Tools::install();
            tools.host_uses(kind);
            let options = Options { programs: tools.programs(), ..Options::default() };
            let error = runtime.block_on(Firewall::open(kind.mode(), &ALL, options)).unwrap_err();
            assert!(matches!(error, Error::NotPermitted { .. }), "{kind:?}: {error}");
            assert!(error.to_string().contains("CAP_NET_ADMIN"), "{error}");
        }
        return;
    }
    flannel_netlink::testing::in_netns(|| {
        let mut command = Command::new("setpriv");
        command.args([
            "--bounding-set=-net_admin,-net_raw",
            "--inh-caps=-net_admin,-net_raw",
            "--",
        ]);
        command
            .arg(std::env::current_exe().unwrap())
            .args(["leaving::the_error_names_the_missing_privilege", "--exact"]);
        let output = command.env(WITHOUT, "1").output().expect("setpriv of util-linux is needed");
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}");
    });
}
