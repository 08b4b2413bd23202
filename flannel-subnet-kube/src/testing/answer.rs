//! The test server's answer to a request.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::channel::Channel;
use http_body_util::{BodyExt, Collected};
use hyper::body::Incoming;
use rustls::pki_types::CertificateDer;
use serde_json::{Value, json};

use super::client::known;
use super::store::Nodes;
use super::stream::{self, Signals};
use super::{Shared, lock};

pub(crate) type Body = Channel<Bytes, std::io::Error>;
type Answer = Response<Body>;

/// Patches of another type have another meaning.
const PATCH: &str = "application/strategic-merge-patch+json";

pub(crate) async fn answer(
    shared: Arc<Shared>,
    client: Vec<CertificateDer<'static>>,
    request: Request<Incoming>,
) -> Result<Answer, Infallible> {
    let (request, body) = request.into_parts();
    // The client disconnected.
    let body = body.collect().await.map(Collected::to_bytes).unwrap_or_default();
    let text = format!("{} {}", request.method, request.uri);
    let gate = lock(&shared.faults).gate.take_if(|gate| text.contains(&gate.text));
    if let Some(mut gate) = gate {
        gate.is_there.send_replace(true);
        // Nothing is ever sent.
        let _ = gate.opens.changed().await;
    }
    match decide(&shared, &client, &request, &body) {
        Some(answer) => Ok(answer),
        None => std::future::pending().await,
    }
}

/// The answer; `None`: there is never one.
///
/// Counting a request and deciding on it is one step. So faults that are set after the request was
/// counted do not affect it, and a counted watch receives all later events.
fn decide(
    shared: &Arc<Shared>,
    client: &[CertificateDer<'_>],
    request: &Parts,
    body: &Bytes,
) -> Option<Answer> {
    let mut requests = lock(&shared.requests);
    requests.push(format!("{} {}", request.method, request.uri));
    if lock(&shared.faults).silent {
        return None;
    }
    if let Some(refused) = refuse(shared, client, request) {
        return Some(refused);
    }
    let (method, path) = (&request.method, request.uri.path());
    let query = parse(request.uri.query().unwrap_or_default());
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    Some(match (method, &parts[..]) {
        (&Method::GET, ["api", "v1", "nodes"]) if query.contains_key("watch") => {
            watch(shared, &query)
        }
        (&Method::GET, ["api", "v1", "nodes"]) => {
            if lock(&shared.faults).cache_blocks && query.contains_key("resourceVersion") {
                return None;
            }
            list(shared, &query)
        }
        (&Method::GET, ["api", "v1", "nodes", name]) => {
            let node = lock(&shared.store).node(name);
            node.map_or_else(|| missing("nodes", name), |node| ok(&node))
        }
        (&Method::PATCH, ["api", "v1", "nodes", name, "status"]) => {
            patch(shared, name, request, body)
        }
        (&Method::GET, ["api", "v1", "namespaces", namespace, "pods", name]) => {
            let pod = lock(&shared.store).pods.get(&format!("{namespace}/{name}")).cloned();
            pod.map_or_else(|| missing("pods", name), |pod| ok(&pod))
        }
        (&Method::GET, ["api"]) => ok(&json!({ "kind": "APIVersions", "versions": ["v1"] })),
        (&Method::GET, ["apis"]) => {
            ok(&json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": [] }))
        }
        (&Method::GET, ["api", "v1"]) => ok(&json!({
            "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "v1",
            "resources": [{ "name": "nodes", "singularName": "node", "namespaced": false,
                "kind": "Node", "verbs": ["get", "list", "watch"], "shortNames": ["no"] }],
        })),
        (&Method::GET, ["version"]) => {
            ok(&json!({ "major": "1", "minor": "33", "gitVersion": "v1.33.0" }))
        }
        (&Method::GET, ["openapi", ..]) => status(StatusCode::NOT_FOUND, "not here"),
        _ => violation(
            shared,
            StatusCode::NOT_FOUND,
            &format!("flannel must not send {method} {path}"),
        ),
    })
}

/// Faults, and missing permissions.
fn refuse(shared: &Shared, client: &[CertificateDer<'_>], request: &Parts) -> Option<Answer> {
    let mut faults = lock(&shared.faults);
    if faults.clients.as_ref().is_some_and(|clients| !known(clients, client)) {
        return Some(status(StatusCode::UNAUTHORIZED, "Unauthorized"));
    }
    if let Some(token) = &faults.token {
        let given =
            request.headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        if given != Some(&format!("Bearer {token}")) {
            return Some(status(StatusCode::UNAUTHORIZED, "Unauthorized"));
        }
    }
    if let Some(code) = faults.proxy {
        let code = StatusCode::from_u16(code).expect("a status that exists");
        return Some(text(code, "<html><body>the server is away</body></html>".to_owned()));
    }
    if let Some((left @ 1.., code, after)) = &mut faults.fail {
        *left -= 1;
        let code = StatusCode::from_u16(*code).expect("a status that exists");
        let mut answer = status(code, "a fault that the test has set");
        if let Some(after) = after {
            answer.headers_mut().insert(header::RETRY_AFTER, (*after).into());
        }
        return Some(answer);
    }
    let (verb, resource) = rbac(request);
    let forbidden = faults.forbidden.contains(&(verb.to_owned(), resource.to_owned()));
    forbidden.then(|| {
        let user = "system:serviceaccount:kube-flannel:flannel";
        let text = format!(
            "{resource} is forbidden: User {user:?} cannot {verb} resource {resource:?} in API \
             group \"\" at the cluster scope"
        );
        status(StatusCode::FORBIDDEN, &text)
    })
}

/// The RBAC verb and resource of a request.
fn rbac(request: &Parts) -> (&'static str, &'static str) {
    let (path, query) = (request.uri.path(), request.uri.query().unwrap_or_default());
    let resource = match path {
        _ if path.ends_with("/status") => "nodes/status",
        _ if path.contains("/pods/") => "pods",
        _ => "nodes",
    };
    let verb = match request.method {
        Method::PATCH => "patch",
        _ if path != "/api/v1/nodes" => "get",
        _ if query.contains("watch=") => "watch",
        _ => "list",
    };
    (verb, resource)
}

fn list(shared: &Shared, query: &BTreeMap<String, String>) -> Answer {
    let refused = |text: &str| violation(shared, StatusCode::BAD_REQUEST, text);
    let get = |name: &str| query.get(name).map(String::as_str);
    // The lowest version that the answer may have. The answer then comes from the server's cache,
    // which has no pages.
    let least = match (get("resourceVersion"), get("resourceVersionMatch")) {
        (Some(_), _) if get("continue").is_some() => {
            return refused("a continued list must not have a resourceVersion");
        }
        (None, None) => None,
        (Some("0"), None) => Some(0),
        (Some(version), Some("NotOlderThan")) => {
            version.parse::<u64>().ok().filter(|version| *version > 0)
        }
        _ => return refused("a list at a version without resourceVersionMatch"),
    };
    let limit =
        match (get("limit").and_then(|limit| limit.parse().ok()).filter(|limit| *limit > 0), least)
        {
            (Some(_), Some(1..)) => {
                return refused("a list with a limit, for which the server would read its store");
            }
            (Some(_), Some(0)) | (None, Some(1..)) => usize::MAX,
            (Some(limit), None) => limit,
            (None, _) => return refused("a list without a limit"),
        };
    let mut store = lock(&shared.store);
    let (nodes, version, after): (Nodes, u64, String) = match (get("continue"), least) {
        (Some(token), _) => match store.lists.remove(token) {
            Some(list) => list,
            None => return gone("The provided continue parameter is too old"),
        },
        (None, Some(least)) => {
            let (nodes, version) = store.cached();
            if version < least || lock(&shared.faults).no_cache {
                return too_large(least, version);
            }
            (nodes, version, String::new())
        }
        (None, None) => (Arc::clone(&store.nodes), store.version, String::new()),
    };
    let mut items: Vec<Arc<str>> = Vec::new();
    let mut last = String::new();
    let rest = nodes
        .range::<str, _>((std::ops::Bound::Excluded(after.as_str()), std::ops::Bound::Unbounded));
    for (name, node) in rest.take(limit) {
        items.push(Arc::clone(node));
        last.clone_from(name);
    }
    let more = nodes.last_key_value().is_some_and(|(name, _)| *name > last) && !items.is_empty();
    let mut metadata = json!({ "resourceVersion": version.to_string() });
    if more {
        // With characters that must be escaped in a URL.
        let token = format!("{version}|{last}+/==");
        metadata["continue"] = json!(token);
        store.lists.insert(token, (nodes, version, last));
    }
    drop(store);
    let (slow, cut) = {
        let mut faults = lock(&shared.faults);
        let cut = faults.cut_lists > 0;
        faults.cut_lists -= u32::from(cut);
        (faults.slow, cut)
    };
    let (sender, body) = Channel::new(4);
    tokio::spawn(stream::items(sender, metadata, items, slow, cut));
    json_answer(StatusCode::OK, body)
}

fn watch(shared: &Arc<Shared>, query: &BTreeMap<String, String>) -> Answer {
    let number = |name: &str| query.get(name).and_then(|text| text.parse::<u64>().ok());
    let Some(from) = number("resourceVersion") else {
        return violation(
            shared,
            StatusCode::BAD_REQUEST,
            "a watch without a resourceVersion misses what came before it",
        );
    };
    let Some(seconds) = number("timeoutSeconds") else {
        return violation(shared, StatusCode::BAD_REQUEST, "a watch without timeoutSeconds");
    };
    if query.get("allowWatchBookmarks").is_none_or(|value| value != "true") {
        return violation(shared, StatusCode::BAD_REQUEST, "a watch without bookmarks");
    }
    {
        let mut faults = lock(&shared.faults);
        if faults.gone > 0 {
            faults.gone -= 1;
            return gone("too old resource version");
        }
        if let (left @ 1.., code) = &mut faults.fail_watches {
            *left -= 1;
            let code = StatusCode::from_u16(*code).expect("a status that exists");
            return status(code, "a fault that the test has set");
        }
    }
    let (version, forgotten) = {
        let store = lock(&shared.store);
        (store.version, store.forgotten)
    };
    if from > version {
        return violation(
            shared,
            StatusCode::BAD_REQUEST,
            &format!("a watch from {from}, a version that does not exist yet"),
        );
    }
    if from < forgotten {
        return gone(&format!("too old resource version: {from} ({forgotten})"));
    }
    let (sender, body) = Channel::new(64);
    let (signals, patience) = (Signals::of(shared), Duration::from_secs(seconds));
    tokio::spawn(stream::events(Arc::clone(shared), signals, sender, from, patience));
    json_answer(StatusCode::OK, body)
}

fn patch(shared: &Shared, name: &str, request: &Parts, body: &Bytes) -> Answer {
    let kind = request.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    if kind != Some(PATCH) {
        let text = format!("a patch of type {kind:?}: Go flannel's is {PATCH}");
        return violation(shared, StatusCode::UNSUPPORTED_MEDIA_TYPE, &text);
    }
    let Ok(patch) = serde_json::from_slice::<Value>(body) else {
        return violation(shared, StatusCode::BAD_REQUEST, "a patch that is not JSON");
    };
    let patched = {
        let mut store = lock(&shared.store);
        if !store.nodes.contains_key(name) {
            return missing("nodes", name);
        }
        let patched = store.patch(name, &patch);
        // Recorded first, so that a client that sees its effect finds it among the patches.
        if patched.is_ok() {
            lock(&shared.patches).push(patch.clone());
        }
        patched.map(|version| (version, store.node(name)))
    };
    match patched {
        Ok((version, node)) => {
            shared.changes.send_replace(version);
            ok(&node.unwrap_or_default())
        }
        Err(wrong) => {
            violation(shared, StatusCode::UNPROCESSABLE_ENTITY, &format!("{wrong}: {patch}"))
        }
    }
}

fn parse(query: &str) -> BTreeMap<String, String> {
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
        .map(|(name, value)| (name.to_owned(), unescape(value)))
        .collect()
}

fn unescape(text: &str) -> String {
    let (mut out, mut bytes) = (Vec::new(), text.bytes());
    while let Some(byte) = bytes.next() {
        let hex = |byte: Option<u8>| char::from(byte.unwrap_or(b'x')).to_digit(16);
        match byte {
            b'%' => {
                let (high, low) = (hex(bytes.next()), hex(bytes.next()));
                out.push((high.unwrap_or(0) * 16 + low.unwrap_or(0)) as u8);
            }
            b'+' => out.push(b' '),
            byte => out.push(byte),
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

fn json_answer(code: StatusCode, body: Body) -> Answer {
    let mut answer = Response::new(body);
    *answer.status_mut() = code;
    answer
        .headers_mut()
        .insert(header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    answer
}

fn text(code: StatusCode, text: String) -> Answer {
    let (mut sender, body) = Channel::new(1);
    // There is room for one part. The drop of the sender ends the body.
    let _ = sender.try_send(hyper::body::Frame::data(text.into()));
    json_answer(code, body)
}

fn ok(value: &Value) -> Answer {
    text(StatusCode::OK, value.to_string())
}

pub(crate) fn status_object(code: StatusCode, message: &str) -> Value {
    let reason = if code == StatusCode::GONE { "Expired" } else { "" };
    json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code.as_u16() })
}

fn status(code: StatusCode, message: &str) -> Answer {
    text(code, status_object(code, message).to_string())
}

/// As the server's `storage.NewTooLargeResourceVersionError`.
fn too_large(least: u64, version: u64) -> Answer {
    let text = format!("Too large resource version: {least}, current: {version}");
    let mut object = status_object(StatusCode::GATEWAY_TIMEOUT, &text);
    object["reason"] = json!("Timeout");
    object["details"] = json!({ "retryAfterSeconds": 1, "causes": [{
        "reason": "ResourceVersionTooLarge", "message": "Too large resource version" }] });
    let mut answer = self::text(StatusCode::GATEWAY_TIMEOUT, object.to_string());
    answer.headers_mut().insert(header::RETRY_AFTER, 1.into());
    answer
}

fn gone(message: &str) -> Answer {
    status(StatusCode::GONE, message)
}

fn missing(resource: &str, name: &str) -> Answer {
    status(StatusCode::NOT_FOUND, &format!("{resource} {name:?} not found"))
}

fn violation(shared: &Shared, code: StatusCode, text: &str) -> Answer {
    lock(&shared.violations).push(text.to_owned());
    status(code, text)
}
