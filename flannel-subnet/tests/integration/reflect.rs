//! Following a registry: no failure removes a peer, and receivers are notified only of changes.

use std::sync::Arc;
use std::time::Duration;

use flannel_core::Subnets;
use flannel_core::lease::{LeaseAttrs, Origin, View};
use flannel_subnet::{MemoryRegistry, Reflector, Registry};
use tokio::sync::watch;

fn key(n: u8) -> Subnets {
    format!("10.1.{n}.0-24").parse().unwrap()
}

async fn put(registry: &MemoryRegistry, n: u8) {
    registry.create(&key(n), &LeaseAttrs::default(), None).await.unwrap();
}

async fn wait(views: &mut watch::Receiver<View>, what: impl FnMut(&View) -> bool) -> View {
    let view = tokio::time::timeout(Duration::from_secs(10), views.wait_for(what)).await;
    view.expect("within 10 s").unwrap().clone()
}

async fn following(registry: &MemoryRegistry) -> (Reflector, watch::Receiver<View>) {
    let reflector = Reflector::start(Arc::new(registry.clone()));
    let mut views = reflector.views();
    assert_eq!(*views.borrow(), View::unknown());
    wait(&mut views, |view| matches!(view.origin, Origin::Live { .. })).await;
    (reflector, views)
}

#[tokio::test(start_paused = true)]
async fn leases_are_added_changed_and_removed() {
    let registry = MemoryRegistry::new();
    put(&registry, 1).await;
    let (reflector, mut views) = following(&registry).await;
    assert_eq!(views.borrow().leases.len(), 1);
    put(&registry, 2).await;
    wait(&mut views, |view| view.leases.len() == 2).await;
    registry.put_raw("10.1.2.0-24", r#"{"PublicIP":"192.0.2.2"}"#, None);
    wait(&mut views, |view| !view.leases.get(&key(2)).unwrap().attrs.preferred.public.is_empty())
        .await;
    registry.delete_key("10.1.1.0-24");
    wait(&mut views, |view| view.leases.len() == 1).await;
    assert_eq!(reflector.freed(), [key(1)]);
    put(&registry, 1).await;
    wait(&mut views, |view| view.leases.len() == 2).await;
    assert_eq!(reflector.freed(), []);
}

#[tokio::test(start_paused = true)]
async fn a_burst_of_changes_is_published_at_once() {
    let registry = MemoryRegistry::new();
    let (_reflector, mut views) = following(&registry).await;
    views.borrow_and_update();
    for n in 0..200 {
        put(&registry, n).await;
    }
    views.changed().await.unwrap();
    assert_eq!(views.borrow_and_update().leases.len(), 200);
    assert!(!views.has_changed().unwrap());
}

#[tokio::test(start_paused = true)]
async fn an_outage_keeps_the_view_and_later_changes_are_applied() {
    let registry = MemoryRegistry::new();
    put(&registry, 1).await;
    put(&registry, 2).await;
    let (_reflector, mut views) = following(&registry).await;
    views.borrow_and_update();
    registry.set_outage(true);
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert!(!views.has_changed().unwrap());
    registry.delete_key("10.1.1.0-24");
    registry.put_raw("10.1.3.0-24", "{}", None);
    registry.set_outage(false);
    let view = wait(&mut views, |view| view.leases.get(&key(3)).is_some()).await;
    assert_eq!(view.leases.iter().map(|lease| lease.subnets).collect::<Vec<_>>(), [key(2), key(3)]);
}

#[tokio::test(start_paused = true)]
async fn a_view_is_not_live_before_the_first_complete_list() {
    let registry = MemoryRegistry::new();
    put(&registry, 1).await;
    registry.set_outage(true);
    let reflector = Reflector::start(Arc::new(registry.clone()));
    let mut views = reflector.views();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(*views.borrow(), View::unknown());
    registry.set_outage(false);
    let view = wait(&mut views, |view| matches!(view.origin, Origin::Live { .. })).await;
    assert_eq!(view.leases.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_gap_causes_a_new_list_and_notifies_only_of_differences() {
    let registry = MemoryRegistry::new();
    put(&registry, 1).await;
    put(&registry, 2).await;
    let (_reflector, mut views) = following(&registry).await;
    let before = views.borrow_and_update().leases.clone();
    // History is forgotten before the watch can read it.
    registry.delete_key("10.1.1.0-24");
    registry.forget_history();
    let view = wait(&mut views, |view| view.leases.len() == 1).await;
    let old = before.get(&key(2)).unwrap();
    let new = view.leases.get(&key(2)).unwrap();
    assert!(Arc::ptr_eq(old, new), "an unchanged lease is shared");

    views.borrow_and_update();
    put(&registry, 5).await;
    registry.delete_key("10.1.5.0-24");
    registry.forget_history();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!views.has_changed().unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_bad_key_or_value_never_removes_a_peer() {
    let registry = MemoryRegistry::new();
    put(&registry, 1).await;
    put(&registry, 2).await;
    let (_reflector, mut views) = following(&registry).await;
    views.borrow_and_update();
    registry.put_raw("nonsense", "{}", None);
    registry.put_raw("10.1.1.0-24", "nonsense", None);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!views.has_changed().unwrap(), "by watch");
    registry.put_raw("10.1.2.0-24", "nonsense", None);
    registry.forget_history();
    registry.put_raw("more nonsense", "{}", None);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!views.has_changed().unwrap(), "by list");
    registry.delete_key("nonsense");
    registry.delete_key("10.1.1.0-24");
    wait(&mut views, |view| view.leases.len() == 1).await;
}
