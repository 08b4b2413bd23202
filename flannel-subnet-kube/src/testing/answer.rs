//! The test server's answer to a request.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ops::Bound;
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

use super::client::is_known;
use super::store::StartedList;
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
        // It ends when the sender is dropped.
        let _ = gate.opens.changed().await;
    }
    match decide(&shared, &client, &request, &body) {
        Some(answer) => Ok(answer),
        None => std::future::pending().await,
    }
}

/// The answer, or `None` if the request never gets an answer.
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
    let method = &request.method;
    let path = request.uri.path();
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

/// The answer to a request that fails because of a fault or a missing permission.
fn refuse(shared: &Shared, client: &[CertificateDer<'_>], request: &Parts) -> Option<Answer> {
    let mut faults = lock(&shared.faults);
    if faults.clients.as_ref().is_some_and(|clients| !is_known(clients, client)) {
        return Some(status(StatusCode::UNAUTHORIZED, "Unauthorized"));
    }
    if let Some(expected) = &faults.authorization {
        let given =
            request.headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        if given != Some(expected) {
            return Some(status(StatusCode::UNAUTHORIZED, "Unauthorized"));
        }
    }
    if let Some(code) = faults.proxy {
        let code = StatusCode::from_u16(code).expect("a status that exists");
        return Some(text(code, "<html><body>the server is away</body></html>".to_owned()));
    }
    if faults.failures.left > 0 {
        faults.failures.left -= 1;
        let code = StatusCode::from_u16(faults.failures.status).expect("a status that exists");
        let mut answer = status(code, "a fault that the test has set");
        if let Some(seconds) = faults.failures.retry_after {
            answer.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
        return Some(answer);
    }
    let verb = rbac_verb(request);
    let resource = rbac_resource(request);
    let is_forbidden = faults.forbidden.contains(&(verb.to_owned(), resource.to_owned()));
    is_forbidden.then(|| {
        let user = "system:serviceaccount:kube-flannel:flannel";
        let text = format!(
            "{resource} is forbidden: User {user:?} cannot {verb} resource {resource:?} in API \
             group \"\" at the cluster scope"
        );
        status(StatusCode::FORBIDDEN, &text)
    })
}

fn rbac_resource(request: &Parts) -> &'static str {
    let path = request.uri.path();
    match path {
        _ if path.ends_with("/status") => "nodes/status",
        _ if path.contains("/pods/") => "pods",
        _ => "nodes",
    }
}

fn rbac_verb(request: &Parts) -> &'static str {
    match request.method {
        Method::PATCH => "patch",
        _ if request.uri.path() != "/api/v1/nodes" => "get",
        _ if request.uri.query().is_some_and(|query| query.contains("watch=")) => "watch",
        _ => "list",
    }
}

/// A checked request for a list.
struct ListRequest<'a> {
    /// The token of the next page.
    token: Option<&'a str>,
    /// The lowest version that the answer may have. With it, the answer comes from the server's
    /// cache, which has no pages.
    least: Option<u64>,
    /// The largest number of nodes in the answer.
    limit: usize,
}

impl<'a> ListRequest<'a> {
    /// Checks a request.
    ///
    /// # Errors
    /// Why flannel must not send it.
    fn parse(query: &'a BTreeMap<String, String>) -> Result<Self, &'static str> {
        let get = |name: &str| query.get(name).map(String::as_str);
        let token = get("continue");
        let least = match (get("resourceVersion"), get("resourceVersionMatch")) {
            (Some(_), _) if token.is_some() => {
                return Err("a continued list must not have a resourceVersion");
            }
            (None, None) => None,
            (Some("0"), None) => Some(0),
            (Some(version), Some("NotOlderThan")) => {
                version.parse::<u64>().ok().filter(|version| *version > 0)
            }
            _ => return Err("a list at a version without resourceVersionMatch"),
        };
        let given = get("limit").and_then(|limit| limit.parse().ok()).filter(|limit| *limit > 0);
        let limit = match (given, least) {
            (Some(_), Some(1..)) => {
                return Err("a list with a limit, for which the server would read its store");
            }
            (Some(_), Some(0)) | (None, Some(1..)) => usize::MAX,
            (Some(limit), None) => limit,
            (None, _) => return Err("a list without a limit"),
        };
        Ok(Self { token, least, limit })
    }
}

fn list(shared: &Shared, query: &BTreeMap<String, String>) -> Answer {
    let request = match ListRequest::parse(query) {
        Ok(request) => request,
        Err(text) => return violation(shared, StatusCode::BAD_REQUEST, text),
    };
    let mut store = lock(&shared.store);
    let StartedList { content, after } = match (request.token, request.least) {
        (Some(token), _) => match store.lists.remove(token) {
            Some(list) => list,
            None => return gone("The provided continue parameter is too old"),
        },
        (None, Some(least)) => {
            let content = store.cached();
            if content.version < least || lock(&shared.faults).no_cache {
                return too_large(least, content.version);
            }
            StartedList { content, after: String::new() }
        }
        (None, None) => StartedList { content: store.stored(), after: String::new() },
    };
    let mut items: Vec<Arc<str>> = Vec::new();
    let mut last = String::new();
    let rest = content.nodes.range::<str, _>((Bound::Excluded(after.as_str()), Bound::Unbounded));
    for (name, node) in rest.take(request.limit) {
        items.push(Arc::clone(node));
        last.clone_from(name);
    }
    let has_more =
        content.nodes.last_key_value().is_some_and(|(name, _)| *name > last) && !items.is_empty();
    let mut metadata = json!({ "resourceVersion": content.version.to_string() });
    if has_more {
        // It has characters that must be escaped in a URL.
        let token = format!("{}|{last}+/==", content.version);
        metadata["continue"] = json!(token);
        store.lists.insert(token, StartedList { content, after: last });
    }
    drop(store);
    let mut faults = lock(&shared.faults);
    let slow = faults.slow;
    let is_cut = faults.cut_lists > 0;
    if is_cut {
        faults.cut_lists -= 1;
    }
    let (sender, body) = Channel::new(4);
    tokio::spawn(stream::items(sender, metadata, items, slow, is_cut));
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
        if faults.watch_failures.left > 0 {
            faults.watch_failures.left -= 1;
            let code =
                StatusCode::from_u16(faults.watch_failures.status).expect("a status that exists");
            return status(code, "a fault that the test has set");
        }
    }
    let store = lock(&shared.store);
    let version = store.version;
    let forgotten = store.forgotten;
    drop(store);
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
    let signals = Signals::of(shared);
    let patience = Duration::from_secs(seconds);
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
    query
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
        .map(|(name, value)| (name.to_owned(), unescape(value)))
        .collect()
}

fn unescape(text: &str) -> String {
    let mut out = Vec::new();
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        let digit = |byte: Option<u8>| char::from(byte.unwrap_or(b'0')).to_digit(16).unwrap_or(0);
        match byte {
            b'%' => {
                let high = digit(bytes.next());
                let low = digit(bytes.next());
                out.push((high * 16 + low) as u8);
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
