//! The condition NetworkUnavailable shows the report, even if other programs write it.

use flannel_core::SubnetManager;
use flannel_core::lease::Origin;
use flannel_core::subnet::Readiness;
use flannel_subnet_kube::{KubeManager, KubeOptions};
use serde_json::json;
use test_support::Logged;

use crate::fixture::{Fixture, V4, blank, until, wait};

fn not_ready(reason: &str) -> Readiness {
    Readiness::NotReady { reason: reason.to_owned() }
}

#[tokio::test]
async fn the_condition_shows_the_reports() {
    let fixture = Fixture::new(V4);
    let (manager, _views) = fixture.following().await;
    let is = |status: &str, reason: &str, message: &str| {
        fixture.server.condition("me", "NetworkUnavailable").is_some_and(|condition| {
            let time = condition["lastTransitionTime"].as_str().unwrap_or_default();
            assert!(time.len() == 20 && time.ends_with('Z'), "{condition}");
            condition["lastHeartbeatTime"].is_string()
                && (condition["status"] == status
                    && condition["reason"] == reason
                    && condition["message"] == message)
        })
    };
    until(|| fixture.server.count("watch=") > 0).await;
    fixture.server.heartbeat("me");
    assert_eq!(fixture.server.condition("me", "NetworkUnavailable"), None, "no report yet");
    manager.report(&Readiness::Ready).await.unwrap();
    until(|| is("False", "FlannelIsUp", "Flannel is running on this node")).await;
    manager.report(&not_ready("it is gone")).await.unwrap();
    until(|| is("True", "FlannelIsDown", "it is gone")).await;
    manager.report(&Readiness::Ready).await.unwrap();
    until(|| is("False", "FlannelIsUp", "Flannel is running on this node")).await;
    // Like a cloud controller.
    fixture.server.modify("me", |node| {
        node["status"]["conditions"] = json!([{ "type": "Ready", "status": "True" },
            { "type": "NetworkUnavailable", "status": "True",
              "reason": "NoRouteCreated", "message": "",
              "lastHeartbeatTime": "2026-11-21T20:00:00Z",
              "lastTransitionTime": "2026-11-21T20:00:00Z" }]);
    });
    until(|| is("False", "FlannelIsUp", "Flannel is running on this node")).await;
    assert!(fixture.server.condition("me", "Ready").is_some(), "others' conditions stay");
    fixture.server.fail(1, 500, None);
    manager.report(&not_ready("again")).await.unwrap();
    until(|| is("True", "FlannelIsDown", "again")).await;
}

#[tokio::test]
async fn only_the_condition_of_an_earlier_boot_is_withdrawn() {
    let fixture = Fixture::new(V4);
    let (manager, _views) = fixture.following().await;
    let condition = || fixture.server.condition("me", "NetworkUnavailable");
    let starting = |datapath_in_place| Readiness::Starting { datapath_in_place };
    manager.report(&starting(false)).await.unwrap();
    assert_eq!(condition(), None, "a node without the condition gets none");
    manager.report(&Readiness::Ready).await.unwrap();
    until(|| condition().is_some_and(|now| now["status"] == "False")).await;
    drop(manager);
    let (manager, _views) = fixture.following().await;
    let before = condition();
    manager.report(&starting(true)).await.unwrap();
    assert_eq!(condition(), before, "the network of the earlier run works");
    manager.report(&starting(false)).await.unwrap();
    let now = condition().unwrap();
    let message = "flannel has only just been started";
    assert_eq!(now["status"], json!("True"));
    assert_eq!(now["message"], json!(message));
    manager.report(&starting(false)).await.unwrap();
    assert_eq!(condition().unwrap(), now);
}

#[tokio::test]
async fn the_condition_is_not_changed_if_the_options_disable_it() {
    let fixture = Fixture::new(V4);
    fixture.server.put_node("me", blank(&["10.1.1.0/24"]));
    let options = KubeOptions { node_condition: false, ..fixture.options("me") };
    let manager = KubeManager::open(options).await.unwrap();
    assert!(!manager.publishes_readiness());
    manager.report(&Readiness::Starting { datapath_in_place: false }).await.unwrap();
    manager.report(&Readiness::Ready).await.unwrap();
    let mut views = manager.watch_leases().await.unwrap();
    wait(views.wait_for(|view| matches!(view.origin, Origin::Live { .. }))).await.unwrap();
    assert_eq!(fixture.server.condition("me", "NetworkUnavailable"), None);
    assert_eq!(fixture.server.count("PATCH"), 0);
}

#[tokio::test]
async fn a_changed_reason_alone_is_not_a_transition() {
    let fixture = Fixture::new(V4);
    let (manager, _views) = fixture.following().await;
    let since = |message: &str| {
        let condition = fixture.server.condition("me", "NetworkUnavailable")?;
        (condition["message"] == message).then(|| condition["lastTransitionTime"].clone())
    };
    let long_ago = "2026-11-21T20:00:00Z";
    manager.report(&not_ready("one reason")).await.unwrap();
    until(|| since("one reason").is_some()).await;
    fixture.server.modify("me", |node| {
        let conditions = node["status"]["conditions"].as_array_mut().unwrap();
        let ours =
            conditions.iter_mut().find(|condition| condition["type"] == "NetworkUnavailable");
        ours.unwrap()["lastTransitionTime"] = json!(long_ago);
    });
    manager.report(&not_ready("another one")).await.unwrap();
    until(|| since("another one") == Some(json!(long_ago))).await;
    manager.report(&Readiness::Ready).await.unwrap();
    let up = "Flannel is running on this node";
    until(|| since(up).is_some_and(|since| since != long_ago)).await;
}

#[tokio::test]
async fn a_change_by_another_writer_is_logged_as_one() {
    let (logged, _collecting) = Logged::collect();
    let fixture = Fixture::new(V4);
    let (manager, _views) = fixture.following().await;
    let is_up = || {
        let condition = fixture.server.condition("me", "NetworkUnavailable");
        condition.is_some_and(|condition| condition["reason"] == "FlannelIsUp")
    };
    manager.report(&Readiness::Ready).await.unwrap();
    until(|| is_up() && logged.count("was set") == 1).await;
    for _ in 0..2 {
        let patches = fixture.server.patches().len();
        fixture.server.modify("me", |node| {
            // The first one is `Ready`.
            node["status"]["conditions"][1]["reason"] = json!("Other");
        });
        until(|| fixture.server.patches().len() > patches && is_up()).await;
    }
    assert_eq!(logged.count("was set"), 1);
    assert_eq!(logged.count("another writer"), 1);
}
