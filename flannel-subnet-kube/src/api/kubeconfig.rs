//! Reads kubeconfigs with `kube`, and checks them for entries that flannel does not use.

use std::path::{Path, PathBuf};

use kube::Config;
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig, KubeconfigError};
use secrecy::{ExposeSecret, SecretString};

use super::chain;

/// The files of a kubeconfig: certificates, keys and tokens, of all its clusters and users. The
/// list is empty if the kubeconfig cannot be read. The connection reports the reason.
///
/// # Blocking
/// Reads a file.
pub fn credential_files(kubeconfig: &Path) -> Vec<PathBuf> {
    let Ok(kubeconfig) = read(kubeconfig) else { return Vec::new() };
    let of_clusters =
        kubeconfig.clusters.into_iter().filter_map(|named| named.cluster?.certificate_authority);
    let of_users = kubeconfig
        .auth_infos
        .into_iter()
        .filter_map(|named| named.auth_info)
        .flat_map(|user| [user.client_certificate, user.client_key, user.token_file])
        .flatten();
    of_clusters.chain(of_users).map(PathBuf::from).collect()
}

/// Reads a kubeconfig. Empty fields, which templates leave, count as absent.
///
/// **Source**: client-go.
fn read(path: &Path) -> Result<Kubeconfig, KubeconfigError> {
    let mut kubeconfig = Kubeconfig::read_from(path)?;
    // `read_from` makes even an empty path absolute.
    let nowhere = path.parent().map(|dir| dir.join(""));
    let drop_empty = |fields: &mut [&mut Option<String>]| {
        for field in fields {
            field.take_if(|text| text.is_empty() || Some(Path::new(text)) == nowhere.as_deref());
        }
    };
    for cluster in kubeconfig.clusters.iter_mut().filter_map(|named| named.cluster.as_mut()) {
        drop_empty(&mut [
            &mut cluster.certificate_authority,
            &mut cluster.certificate_authority_data,
            &mut cluster.proxy_url,
            &mut cluster.tls_server_name,
        ]);
    }
    for user in kubeconfig.auth_infos.iter_mut().filter_map(|named| named.auth_info.as_mut()) {
        drop_empty(&mut [
            &mut user.username,
            &mut user.impersonate,
            &mut user.token_file,
            &mut user.client_certificate,
            &mut user.client_certificate_data,
            &mut user.client_key,
        ]);
        let is_empty = |secret: &mut SecretString| secret.expose_secret().is_empty();
        user.token.take_if(is_empty);
        user.client_key_data.take_if(is_empty);
        user.password.take_if(is_empty);
    }
    Ok(kubeconfig)
}

pub(super) async fn from_kubeconfig(path: &Path) -> Result<Config, String> {
    let mut kubeconfig = read(path).map_err(|error| chain(&error))?;
    let context = kubeconfig
        .contexts
        .iter()
        .find(|named| Some(&named.name) == kubeconfig.current_context.as_ref());
    let cluster_name = context.and_then(|named| Some(&named.context.as_ref()?.cluster));
    let cluster = kubeconfig.clusters.iter_mut().find(|named| Some(&named.name) == cluster_name);
    let proxy = cluster.and_then(|named| {
        let proxy = &mut named.cluster.as_mut()?.proxy_url;
        let given = proxy.clone();
        // Without one, `Config` would use and refuse the proxies of the environment.
        proxy.get_or_insert_with(|| "http://localhost".to_owned());
        given
    });
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
        .await
        .map_err(|error| chain(&error))?;
    let exec = config.auth_info.exec.as_mut();
    if let Some(cluster) = exec.and_then(|exec| exec.cluster.as_mut()) {
        cluster.proxy_url.clone_from(&proxy);
    }
    config.proxy_url = match proxy {
        Some(url) => Some(url.parse().map_err(|error| format!("its proxy-url: {error}"))?),
        None => None,
    };
    let AuthInfo { auth_provider, impersonate, .. } = &config.auth_info;
    let others = [("auth-provider", auth_provider.is_some()), ("as", impersonate.is_some())];
    if let Some((other, _)) = others.iter().find(|(_, given)| *given) {
        return Err(format!(
            "its user has {other:?}, which cannot be used: expected a token, a tokenFile, a \
             username, a client certificate or exec"
        ));
    }
    if config.accept_invalid_certs && config.root_cert.is_some() {
        return Err(
            "it has insecure-skip-tls-verify and a certificate-authority: expected only one of \
             them"
                .to_owned(),
        );
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_credential_files_of_a_kubeconfig_are_listed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubeconfig");
        let text = "apiVersion: v1\nkind: Config\ncurrent-context: a\n\
                    clusters: [{name: a, cluster: \
                    {server: 'https://192.0.2.1', certificate-authority: ca.crt}}]\n\
                    contexts: [{name: a, context: {cluster: a, user: a}}]\n\
                    users:\n- name: a\n  \
                    user: {client-certificate: /tls/a.crt, client-key: /tls/a.key}\n\
                    - name: b\n  \
                    user: {tokenFile: /tls/token, client-certificate: '', client-key: ''}\n";
        std::fs::write(&path, text).unwrap();
        let expected = [
            dir.path().join("ca.crt"),
            "/tls/a.crt".into(),
            "/tls/a.key".into(),
            "/tls/token".into(),
        ];
        assert_eq!(credential_files(&path), expected);
        assert!(credential_files(&dir.path().join("none")).is_empty());
    }
}
