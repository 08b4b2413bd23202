//! The condition NetworkUnavailable: it says what it was told, whoever else writes it.

use flannel_subnet_kube::Network;
use serde_json::json;
use tokio::sync::watch;

use crate::ground::{Ground, V4, until};

#[tokio::test]
async fn the_condition_follows_what_it_is_told() {
    let ground = Ground::new(V4);
    let (manager, _views) = ground.following().await;
    let (tell, told) = watch::channel(None);
    let is = |status: &str, reason: &str, message: &str| {
        ground.server.condition("me", "NetworkUnavailable").is_some_and(|condition| {
            let time = condition["lastTransitionTime"].as_str().unwrap_or_default();
            assert!(time.len() == 20 && time.ends_with('Z'), "{condition}");
            condition["lastHeartbeatTime"].is_string()
                && (condition["status"] == status
                    && condition["reason"] == reason
                    && condition["message"] == message)
        })
    };
    let story = async {
        until(|| ground.server.count("watch=") > 0).await;
        ground.server.heartbeat("me");
        assert_eq!(
            ground.server.condition("me", "NetworkUnavailable"),
            None,
            "nothing is said yet"
        );
        tell.send_replace(Some(Network::Available));
        until(|| is("False", "FlannelIsUp", "Flannel is running on this node")).await;
        tell.send_replace(Some(Network::Unavailable("it is gone".into())));
        until(|| is("True", "FlannelIsDown", "it is gone")).await;
        tell.send_replace(Some(Network::Available));
        until(|| is("False", "FlannelIsUp", "Flannel is running on this node")).await;
        // Cloud controllers do this.
        ground.server.modify("me", |node| {
            node["status"]["conditions"] = json!([{ "type": "Ready", "status": "True" },
                { "type": "NetworkUnavailable", "status": "True", "reason": "NoRouteCreated", "message": "",
                  "lastHeartbeatTime": "2026-11-21T20:00:00Z", "lastTransitionTime": "2026-11-21T20:00:00Z" }]);
        });
        until(|| is("False", "FlannelIsUp", "Flannel is running on this node")).await;
        assert!(ground.server.condition("me", "Ready").is_some(), "others' conditions stay");
        ground.server.fail(1, 500, None);
        tell.send_replace(Some(Network::Unavailable("again".into())));
        until(|| is("True", "FlannelIsDown", "again")).await;
    };
    tokio::select! {
        never = manager.keep_condition(told) => match never {},
        () = story => {}
    }
}

#[tokio::test]
async fn what_an_earlier_boot_said_is_withdrawn_and_nothing_else() {
    let ground = Ground::new(V4);
    let (manager, _views) = ground.following().await;
    let condition = || ground.server.condition("me", "NetworkUnavailable");
    manager.withdraw_condition("it begins").await.unwrap();
    assert_eq!(condition(), None, "it is not there, which is no promise");
    let (_tell, told) = watch::channel(Some(Network::Available));
    tokio::select! {
        never = manager.keep_condition(told) => match never {},
        () = until(|| condition().is_some_and(|now| now["status"] == "False")) => {}
    }
    manager.withdraw_condition("it begins").await.unwrap();
    let now = condition().unwrap();
    assert_eq!((&now["status"], &now["message"]), (&json!("True"), &json!("it begins")));
    manager.withdraw_condition("in other words").await.unwrap();
    assert_eq!(condition().unwrap(), now);
}

#[tokio::test]
async fn another_reason_is_no_transition() {
    let ground = Ground::new(V4);
    let (manager, _views) = ground.following().await;
    let (tell, told) = watch::channel(None);
    let since = |message: &str| {
        let condition = ground.server.condition("me", "NetworkUnavailable")?;
        (condition["message"] == message).then(|| condition["lastTransitionTime"].clone())
    };
    let long_ago = "2026-11-21T20:00:00Z";
    let story = async {
        tell.send_replace(Some(Network::Unavailable("one reason".into())));
        until(|| since("one reason").is_some()).await;
        ground.server.modify("me", |node| {
            let conditions = node["status"]["conditions"].as_array_mut().unwrap();
            let ours =
                conditions.iter_mut().find(|condition| condition["type"] == "NetworkUnavailable");
            ours.unwrap()["lastTransitionTime"] = json!(long_ago);
        });
        tell.send_replace(Some(Network::Unavailable("another one".into())));
        until(|| since("another one") == Some(json!(long_ago))).await;
        tell.send_replace(Some(Network::Available));
        let up = "Flannel is running on this node";
        until(|| since(up).is_some_and(|since| since != long_ago)).await;
    };
    tokio::select! {
        never = manager.keep_condition(told) => match never {},
        () = story => {}
    }
}
