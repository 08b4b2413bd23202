//! A failing API server: views stay, and are updated as soon as it answers.

use std::time::{Duration, Instant};

use flannel_core::{Credential, Error, SubnetManager};
use flannel_subnet_kube::KubeManager;
use flannel_subnet_kube::testing::{Cut, Held};
use test_support::Logged;

use crate::fixture::{Fixture, V4, leases, peer, until, vxlan};

fn put(fixture: &Fixture, n: u8) {
    let cidr = format!("10.1.{n}.0/24");
    fixture
        .server
        .put_node(&format!("n{n}"), peer(&cidr, &format!("192.0.2.{n}"), "0a:00:00:00:00:02"));
}

/// The number of requested lists or pages, without requests that only ask for the version.
fn lists(fixture: &Fixture) -> usize {
    let all = fixture.server.count("GET /api/v1/nodes?");
    all - fixture.server.count("watch=") - versions(fixture)
}

/// The number of requests for the version of the server's store.
fn versions(fixture: &Fixture) -> usize {
    fixture.server.count("GET /api/v1/nodes?limit=1")
}

#[tokio::test]
async fn a_broken_watch_continues_at_its_last_version() {
    let fixture = Fixture::new(V4);
    let (_manager, views) = fixture.following().await;
    for (n, how) in (2..).zip([Cut::MidEvent, Cut::Clean, Cut::MidEvent, Cut::MidEvent, Cut::Clean])
    {
        let before = fixture.server.count("watch=");
        put(&fixture, n);
        until(|| views.borrow().leases.len() == usize::from(n) - 1).await;
        fixture.server.cut(how);
        until(|| fixture.server.count("watch=") > before).await;
    }
    put(&fixture, 9);
    until(|| views.borrow().leases.len() == 6).await;
    assert_eq!(lists(&fixture), 1, "nothing was listed again");
}

#[tokio::test]
async fn a_version_that_is_too_old_causes_a_list() {
    let fixture = Fixture::new(V4);
    put(&fixture, 2);
    let (_manager, views) = fixture.following().await;
    for how in [Cut::Gone, Cut::MidEvent] {
        until(|| fixture.server.count("watch=") > 0).await;
        // A new watch finds its version too old, or the open one reports so.
        fixture.server.refuse_watches(if how == Cut::Gone { 0 } else { 3 });
        let before = lists(&fixture);
        fixture.server.cut(how);
        until(|| lists(&fixture) > before).await;
    }
    fixture.server.delete_node("n2");
    put(&fixture, 3);
    until(|| leases(&views.borrow()) == ["10.1.3.0-24 vxlan 192.0.2.3"]).await;
    assert_eq!(
        fixture.server.count("limit="),
        0,
        "lists come from the cache, because all nodes would read the server's store at once"
    );
}

#[tokio::test]
async fn the_last_events_of_a_watch_are_published() {
    let fixture = Fixture::new(V4);
    let (_manager, views) = fixture.following().await;
    for (n, how) in (2..).zip([Cut::Error(500), Cut::Error(504), Cut::MidEvent, Cut::Clean]) {
        watches(&fixture, &views, 10 + n).await;
        let node = peer(&format!("10.1.{n}.0/24"), &format!("192.0.2.{n}"), "0a:00:00:00:00:02");
        fixture.server.put_node_and_cut(&format!("n{n}"), node, how);
        until(|| views.borrow().leases.len() == 2 * usize::from(n - 1)).await;
    }
    assert_eq!(lists(&fixture), 1, "nothing was listed again");
}

/// Waits until the last watch is open and its events are published.
async fn watches(
    fixture: &Fixture,
    views: &tokio::sync::watch::Receiver<flannel_core::lease::View>,
    n: u8,
) {
    put(fixture, n);
    sees(views, n).await;
}

/// Waits until a view has the lease of the node `n`.
async fn sees(views: &tokio::sync::watch::Receiver<flannel_core::lease::View>, n: u8) {
    until(|| {
        views
            .borrow()
            .leases
            .iter()
            .any(|lease| lease.subnets.to_string() == format!("10.1.{n}.0-24"))
    })
    .await;
}

/// The server answers other requests.
#[tokio::test]
async fn a_version_that_only_causes_errors_is_dropped() {
    for status in [400, 500, 504] {
        let fixture = Fixture::new(V4);
        let (_manager, views) = fixture.following().await;
        watches(&fixture, &views, 2).await;
        let watched = fixture.server.count("watch=");
        fixture.server.fail_watches(3, status);
        fixture.server.cut(Cut::Clean);
        passes(&fixture, || lists(&fixture) == 2).await;
        let requests = fixture.server.requests();
        let list = requests.iter().rposition(|request| request.contains("NotOlderThan")).unwrap();
        let before = requests[..list].iter().filter(|request| request.contains("watch=")).count();
        // After the first failure the version is asked for.
        assert_eq!(before, watched + 3);
        assert_eq!(versions(&fixture), 2);
        watches(&fixture, &views, 3).await;
    }
}

/// After an outage the watch reports the missed changes.
#[tokio::test]
async fn an_outage_alone_causes_no_list() {
    for status in [500, 503, 504] {
        let fixture = Fixture::new(V4);
        let (_manager, views) = fixture.following().await;
        watches(&fixture, &views, 2).await;
        fixture.server.fail(6, status, Some(0));
        fixture.server.cut(Cut::Clean);
        put(&fixture, 10);
        passes(&fixture, || views.borrow().leases.len() == 2).await;
        assert_eq!(lists(&fixture), 1, "after {status}");
    }
}

/// As after a restoration of the server's store from a backup.
#[tokio::test]
async fn a_version_that_the_server_never_reaches_is_dropped() {
    let fixture = Fixture::new(V4);
    let (_manager, views) = fixture.following().await;
    watches(&fixture, &views, 2).await;
    // Lists that its cache answers fail permanently.
    fixture.server.fail_cached_lists(true);
    let first = fixture.server.hold("NotOlderThan");
    fixture.server.cut(Cut::Gone);
    let second = again(&fixture, first).await;
    assert_eq!(fixture.server.count("limit="), 0, "the cache is waited for");
    // The store is read once for each time that the cache is waited for.
    fixture.server.cut_lists(1);
    advance(11).await;
    let third = again(&fixture, second).await;
    assert_eq!(fixture.server.count("limit="), 1);
    let fourth = again(&fixture, third).await;
    assert_eq!(fixture.server.count("limit="), 1, "the cache is waited for again");
    advance(11).await;
    put(&fixture, 3);
    drop(fourth);
    // The list shows it. A watch, which can break, would show later changes.
    sees(&views, 3).await;
    watches(&fixture, &views, 4).await;
    assert_eq!(fixture.server.count("limit="), 2);
    assert_eq!(views.borrow().leases.len(), 3);
    // A later list tries the cache again.
    fixture.server.fail_cached_lists(false);
    let asked = fixture.server.count("NotOlderThan");
    fixture.server.cut(Cut::Gone);
    until(|| fixture.server.count("NotOlderThan") > asked).await;
    watches(&fixture, &views, 5).await;
    assert_eq!(fixture.server.count("limit="), 2);
}

/// The version of the restored store is smaller. A watch from the old version would be accepted,
/// and would show nothing for a long time.
#[tokio::test]
async fn a_store_restored_during_an_outage_is_listed_again() {
    let fixture = Fixture::new(V4);
    put(&fixture, 3);
    let (_manager, views) = fixture.following().await;
    watches(&fixture, &views, 2).await;
    let backup = fixture.server.back_up();
    fixture.server.delete_node("n3");
    put(&fixture, 4);
    sees(&views, 4).await;
    fixture.server.fail(2, 503, Some(0));
    fixture.server.restore(&backup);
    fixture.server.cut(Cut::MidEvent);
    let leases = || views.borrow().leases.clone();
    let has = |lease: &str| leases().get(&lease.parse().unwrap()).is_some();
    until(|| has("10.1.3.0-24") && !has("10.1.4.0-24")).await;
    // Versions that are not smaller than before the outage need no list.
    let before = lists(&fixture);
    fixture.server.fail(1, 503, Some(0));
    fixture.server.cut(Cut::MidEvent);
    let opened = fixture.server.count("watch=");
    until(|| fixture.server.count("watch=") > opened).await;
    put(&fixture, 5);
    sees(&views, 5).await;
    assert_eq!(lists(&fixture), before);
}

/// The server answers 410 after an outage. The pause before the list is short then.
#[tokio::test]
async fn a_list_after_an_outage_does_not_wait_as_long_as_the_outage() {
    let fixture = Fixture::new(V4);
    let (_manager, views) = fixture.following().await;
    watches(&fixture, &views, 2).await;
    // The pauses between them grow to more than three seconds.
    fixture.server.fail(3, 503, Some(0));
    fixture.server.refuse_watches(1);
    fixture.server.cut(Cut::MidEvent);
    let failed = || fixture.server.requests().len();
    let before = failed();
    let watches = fixture.server.count("watch=");
    until(|| failed() > before + 3 && fixture.server.count("watch=") > watches).await;
    let begin = Instant::now();
    put(&fixture, 3);
    sees(&views, 3).await;
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
}

/// Holds the next list that the server's cache answers, so that no other request follows on slow
/// machines.
async fn again(fixture: &Fixture, held: Held) -> Held {
    until(|| held.is_there()).await;
    let next = fixture.server.hold("NotOlderThan");
    drop(held);
    until(|| next.is_there()).await;
    next
}

/// Begins an overload of the server, or ends it.
type Overload = dyn Fn(&Fixture, bool);

/// All nodes need a list at the same time, because the server was restarted, and it is overloaded.
#[tokio::test]
async fn an_overloaded_server_is_asked_for_no_list_from_its_store() {
    let overloads: [&Overload; 6] = [
        &|fixture, begins| fixture.server.fail(if begins { u32::MAX } else { 0 }, 500, None),
        &|fixture, begins| fixture.server.fail(if begins { u32::MAX } else { 0 }, 504, None),
        &|fixture, begins| fixture.server.fail(if begins { u32::MAX } else { 0 }, 429, Some(1)),
        &|fixture, begins| fixture.server.answer_as_proxy(begins.then_some(504)),
        &|fixture, begins| fixture.server.be_silent(begins),
        // Like servers before Kubernetes 1.31 while their cache is not ready.
        &|fixture, begins| fixture.server.block_cached_lists(begins),
    ];
    for (n, overload) in overloads.iter().enumerate() {
        let fixture = Fixture::new(V4);
        let (_manager, views) = fixture.following().await;
        watches(&fixture, &views, 2).await;
        let asked = || fixture.server.count("NotOlderThan");
        let before = asked();
        // The list that the watch needs is the first one that fails.
        let list = fixture.server.hold("NotOlderThan");
        fixture.server.cut(Cut::Gone);
        until(|| list.is_there()).await;
        overload(&fixture, true);
        drop(list);
        passes(&fixture, || asked() >= before + 6).await;
        let paged = || fixture.server.count("limit=500");
        assert_eq!(paged(), 0, "overload {n}");
        overload(&fixture, false);
        put(&fixture, 3);
        passes(&fixture, || views.borrow().leases.len() == 2).await;
        assert_eq!(paged(), 0, "after overload {n}");
    }
}

#[tokio::test]
async fn an_outage_ends_as_soon_as_a_watch_is_open() {
    let logged = Logged::default();
    let _guard = tracing::subscriber::set_default(logged.clone());
    let fixture = Fixture::new(V4);
    let (_manager, views) = fixture.following().await;
    watches(&fixture, &views, 2).await;
    fixture.server.fail(1, 503, Some(0));
    fixture.server.cut(Cut::Clean);
    until(|| logged.count("the store answers leases=1") == 1).await;
    assert_eq!(logged.count("store lost"), 1);
    assert_eq!(lists(&fixture), 1);
    assert_eq!(fixture.server.count("watch="), 3);
}

/// Polls a condition while time passes quickly.
async fn passes(fixture: &Fixture, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < Duration::from_secs(60), "{:#?}", fixture.server.requests());
        advance(1).await;
        // The server's time does not pass more quickly.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn advance(seconds: u64) {
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(seconds)).await;
    tokio::time::resume();
}

#[tokio::test]
async fn a_silent_watch_continues_and_a_list_follows_if_it_stays_silent() {
    let fixture = Fixture::new(V4);
    let (manager, views) = fixture.following().await;
    watches(&fixture, &views, 2).await;
    advance(60).await;
    watches(&fixture, &views, 3).await;
    assert_eq!(fixture.server.count("watch="), 1);
    let confirmed = || manager.store_status().confirmed.unwrap().at;
    // Silence since its last event.
    let silence = async |watches: usize| {
        let before = confirmed();
        advance(91).await;
        until(|| fixture.server.count("watch=") == watches && confirmed() > before).await;
    };
    silence(2).await;
    assert_eq!(lists(&fixture), 1, "nodes come from the watch");
    watches(&fixture, &views, 4).await;
    silence(3).await;
    assert_eq!(lists(&fixture), 1, "it was not silent all the time");
    silence(4).await;
    // A quiet cluster may be silent for longer. Its nodes must not all use the server's store.
    assert_eq!(lists(&fixture), 2);
    assert_eq!(fixture.server.count("limit="), 0);
    watches(&fixture, &views, 5).await;
}

#[tokio::test]
async fn a_watch_continues_from_a_bookmark() {
    let fixture = Fixture::new(V4);
    let (manager, views) = fixture.following().await;
    watches(&fixture, &views, 2).await;
    let confirmed = || manager.store_status().confirmed.unwrap().revision;
    let before = confirmed();
    // The versions before the bookmark are too old for a watch.
    fixture.server.forget_history();
    fixture.server.bookmark();
    until(|| confirmed() > before).await;
    fixture.server.cut(Cut::Clean);
    until(|| fixture.server.count("watch=") == 2).await;
    watches(&fixture, &views, 3).await;
    assert_eq!(fixture.server.count("limit="), 0);
}

#[tokio::test]
async fn a_broken_list_is_started_again() {
    let fixture = Fixture::new(V4);
    let many = |from: u32| {
        (from..from + 600).map(|n| {
            let cidr = format!("10.1.{}.{}/30", n / 64, n % 64 * 4);
            (format!("node-{n}"), peer(&cidr, "192.0.2.9", "0a:00:00:00:00:02"))
        })
    };
    fixture.server.put_node("me", crate::fixture::blank(&["10.1.254.0/24"]));
    fixture.server.fill(many(0));
    fixture.server.cut_lists(1);
    let (_manager, views) = fixture.following().await;
    assert_eq!(views.borrow().leases.len(), 600);
    assert_eq!(fixture.server.count("NotOlderThan"), 2);
}

#[tokio::test]
async fn a_broken_or_late_page_causes_another_list() {
    let fixture = Fixture::new(V4);
    let many = (0..600).map(|n| {
        let cidr = format!("10.1.{}.{}/30", n / 64, n % 64 * 4);
        (format!("node-{n}"), peer(&cidr, "192.0.2.9", "0a:00:00:00:00:02"))
    });
    fixture.server.fill(many);
    // Without a node of its own, a manager's list has pages.
    let follow = async || {
        fixture.server.put_node("me", crate::fixture::blank(&["10.1.254.0/24"]));
        let manager = fixture.manager("me").await;
        manager.network_config().await.unwrap();
        fixture.server.delete_node("me");
        let views = manager.watch_leases().await.unwrap();
        (manager, views)
    };
    fixture.server.cut_lists(1);
    let (_manager, views) = follow().await;
    until(|| views.borrow().leases.len() == 600).await;
    let logged = Logged::default();
    let _guard = tracing::subscriber::set_default(logged.clone());
    // The token of the next page expires.
    let pages = fixture.server.count("continue=");
    let before = fixture.server.count("limit=");
    fixture.server.slow_lists(Duration::from_millis(1));
    let (_manager, views) = follow().await;
    until(|| fixture.server.count("limit=") > before).await;
    fixture.server.forget_history();
    until(|| fixture.server.count("continue=") > pages).await;
    fixture.server.slow_lists(Duration::ZERO);
    until(|| views.borrow().leases.len() == 600).await;
    assert!(logged.warnings().is_empty(), "the server is not lost: {:?}", logged.warnings());
}

#[tokio::test]
async fn many_410_answers_do_not_cause_many_lists() {
    let fixture = Fixture::new(V4);
    put(&fixture, 2);
    let (_manager, views) = fixture.following().await;
    until(|| fixture.server.count("watch=") > 0).await;
    fixture.server.refuse_watches(4);
    fixture.server.cut(Cut::Gone);
    let begin = Instant::now();
    let before = lists(&fixture);
    put(&fixture, 3);
    until(|| lists(&fixture) >= before + 5).await;
    assert!(begin.elapsed() > Duration::from_millis(700), "pauses grow: {:?}", begin.elapsed());
    until(|| views.borrow().leases.len() == 2).await;
}

#[tokio::test]
async fn failures_do_not_change_the_view_and_are_reported_while_they_last() {
    let fixture = Fixture::new(V4);
    put(&fixture, 2);
    let (manager, views) = fixture.following().await;
    until(|| fixture.server.count("watch=") > 0).await;
    fixture.server.fail(3, 500, None);
    fixture.server.cut(Cut::MidEvent);
    let error = || manager.store_status().last_error.map(|error| error.text);
    until(|| error().is_some_and(|text| text.contains("500"))).await;
    assert_eq!(views.borrow().leases.len(), 1, "the view is unchanged");
    put(&fixture, 3);
    until(|| views.borrow().leases.len() == 2).await;
    assert_eq!(error(), None);
    assert!(manager.store_status().failures() >= 3);
}

#[tokio::test]
async fn a_client_respects_retry_after() {
    let fixture = Fixture::new(V4);
    let (manager, _views) = fixture.following().await;
    until(|| fixture.server.count("watch=") > 0).await;
    let begin = Instant::now();
    fixture.server.fail(1, 429, Some(1));
    manager.acquire_lease(&vxlan()).await.unwrap();
    assert!(begin.elapsed() >= Duration::from_secs(1), "{:?}", begin.elapsed());
    let begin = Instant::now();
    let watches = fixture.server.count("watch=");
    fixture.server.fail(1, 429, Some(1));
    fixture.server.cut(Cut::Clean);
    until(|| fixture.server.count("watch=") >= watches + 2).await;
    assert!(begin.elapsed() >= Duration::from_secs(1), "{:?}", begin.elapsed());
}

#[tokio::test]
async fn a_slow_list_is_not_aborted() {
    let fixture = Fixture::new(V4);
    (2..40).for_each(|n| put(&fixture, n));
    fixture.server.slow_lists(Duration::from_millis(20));
    let begin = Instant::now();
    let (_manager, views) = fixture.following().await;
    assert_eq!(views.borrow().leases.len(), 38);
    assert!(begin.elapsed() > Duration::from_millis(700));
}

#[tokio::test]
async fn a_token_may_be_a_value_or_a_file_of_its_own() {
    let fixture = Fixture::new(V4);
    fixture.server.put_node("me", crate::fixture::blank(&["10.1.1.0/24"]));
    fixture.server.expect_token("canary");
    let file = fixture.dir.path().join("token");
    std::fs::write(&file, "canary\n").unwrap();
    for token in [Credential::value(*b"canary"), Credential::File(file)] {
        let mut options = fixture.options("me");
        options.token = Some(token);
        let shown = format!("{options:?}");
        assert!(!shown.contains("canary"), "{shown}");
        KubeManager::open(options).await.unwrap().hints().await.unwrap();
    }
    let mut options = fixture.options("me");
    options.token = Some(Credential::value(*b" "));
    let error = KubeManager::open(options).await.unwrap_err().to_string();
    assert!(error.contains("the token: it is empty"), "{error}");
}

#[tokio::test]
async fn a_rotated_token_is_read_again() {
    let fixture = Fixture::new(V4);
    let token = fixture.dir.path().join("token");
    let rotate = |to: &str| {
        // With the line end that editors add.
        std::fs::write(&token, format!("{to}\n")).unwrap();
        fixture.server.expect_token(to);
    };
    rotate("first");
    let kubeconfig = fixture.dir.path().join("kubeconfig");
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [\
         {{name: other, cluster: {{server: \"https://h\", proxy-url: \"http://p\"}}}}, \
         {{name: c, cluster: {{server: \"{}\"}}}}]\n\
         contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
         users: [{{name: u, user: {{tokenFile: {}}}}}]\n",
        fixture.server.url(),
        token.display()
    );
    std::fs::write(&kubeconfig, text).unwrap();
    let mut options = fixture.options("me");
    options.kubeconfig = Some(kubeconfig);
    options.api_url = None;
    fixture.server.put_node("me", crate::fixture::blank(&["10.1.1.0/24"]));
    let manager = KubeManager::open(options).await.unwrap();
    let views = manager.watch_leases().await.unwrap();
    manager.acquire_lease(&vxlan()).await.unwrap();
    until(|| views.borrow().leases.len() == 1).await;
    for (n, name) in [(2, "second"), (3, "third")] {
        let begin = Instant::now();
        rotate(name);
        manager.hints().await.unwrap();
        put(&fixture, n);
        until(|| views.borrow().leases.len() == usize::from(n)).await;
        // A client that reads it once a minute is too late.
        assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
    }
    // The token stays wrong.
    fixture.server.expect_token("unknown");
    let error = manager.hints().await.unwrap_err();
    assert!(
        matches!(error, Error::Refused { .. }) && error.to_string().contains("(401"),
        "{error}"
    );
    assert_eq!(views.borrow().leases.len(), 3, "the view is unchanged");
    std::fs::write(&token, " \n").unwrap();
    let error = manager.hints().await.unwrap_err().to_string();
    assert!(error.contains(&format!("the token {}: it is empty", token.display())), "{error}");
    std::fs::write(&token, "third").unwrap();
    // There are no other credentials.
    std::fs::write(fixture.dir.path().join("kubeconfig"), "nonsense").unwrap();
    let error = manager.hints().await.unwrap_err().to_string();
    let parts = ["(401", "the credentials cannot be read again: ", "kubeconfig: "];
    assert!(parts.iter().all(|part| error.contains(part)), "{error}");
}
