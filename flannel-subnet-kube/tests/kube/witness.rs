//! An independent reader: kubectl understands the annotations and the test server.

use std::process::Command;

use flannel_core::SubnetManager;
use serde_json::Value;

use crate::fixture::{Fixture, MAC, V4, blank, vxlan};

#[tokio::test]
async fn kubectl_reads_the_lease() {
    let fixture = Fixture::new(V4);
    fixture.server.put_node("me", blank(&["10.1.1.0/24"]));
    fixture.manager("me").await.acquire_lease(&vxlan()).await.unwrap();
    let output = Command::new("kubectl")
        .args(["--server", &fixture.server.url(), "get", "nodes", "-o", "json"])
        .env("HOME", fixture.dir.path())
        .env_remove("KUBECONFIG")
        .output()
        .expect("kubectl is needed for this test: on Debian, apt-get install kubernetes-client");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let nodes: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(nodes["items"].as_array().unwrap().len(), 1);
    let annotations = &nodes["items"][0]["metadata"]["annotations"];
    assert_eq!(annotations["flannel.alpha.coreos.com/backend-data"], MAC);
    assert_eq!(annotations["flannel.alpha.coreos.com/kube-subnet-manager"], "true");
    // Its watch and limit are Kubernetes' own.
    fixture.server.take_violations();
}
