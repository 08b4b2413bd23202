//! Reads the Kubernetes manifests of flannel, for the tests that check them.
//!
//! Only Helm renders the chart. `deploy/render-manifests.sh` writes
//! `deploy/kube-flannel.yml` and `deploy/rendered/` from it. `tests/integration/chart.rs` checks
//! these files and the chart as far as it can without helm. `tests/helm.rs` needs helm and is not
//! part of `cargo test`:
//!
//! ```sh
//! HELM=/path/to/helm cargo test -p packaging --test helm
//! ```

use serde_json::Value;

/// The documents of a YAML file. Empty documents are left out.
///
/// # Errors
/// A document is not YAML.
pub fn documents(text: &str) -> Result<Vec<Value>, Box<serde_saphyr::Error>> {
    let mut documents: Vec<Value> = serde_saphyr::from_multiple(text)?;
    documents.retain(|document| !document.is_null());
    Ok(documents)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn documents_are_split_and_errors_are_reported() {
        assert_eq!(
            documents("---\n# nothing\n---\na: 1\n---\nb: [x]\n").unwrap(),
            [json!({ "a": 1 }), json!({ "b": ["x"] })]
        );
        documents("a: [1").unwrap_err();
        documents("a: 1\na: 2").unwrap_err();
    }
}
