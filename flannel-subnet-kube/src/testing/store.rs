//! The data of the test server: nodes as JSON text, and the events for watches.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Value, json};

/// The number of events that are kept.
const HISTORY: usize = 4000;

/// Nodes as JSON text, by name.
pub(crate) type Nodes = Arc<BTreeMap<String, Arc<str>>>;

/// All nodes at a version.
#[derive(Debug, Clone)]
pub(crate) struct NodesAt {
    pub(crate) nodes: Nodes,
    pub(crate) version: u64,
}

/// A list whose first pages were sent.
#[derive(Debug)]
pub(crate) struct StartedList {
    /// The nodes at the start.
    pub(crate) content: NodesAt,
    /// The name of the last node that was sent.
    pub(crate) after: String,
}

/// An event as a line of a watch.
#[derive(Debug, Clone)]
pub(crate) struct StoredEvent {
    pub(crate) version: u64,
    pub(crate) line: Bytes,
}

#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) nodes: Nodes,
    pub(crate) pods: BTreeMap<String, Value>,
    pub(crate) version: u64,
    /// Versions up to this one are too old for a watch or the next page of a list.
    pub(crate) forgotten: u64,
    pub(crate) events: VecDeque<StoredEvent>,
    /// The content of the server's cache if that is late. Watches and lists that it may answer see
    /// nothing else.
    pub(crate) late: Option<NodesAt>,
    /// Started lists by token.
    pub(crate) lists: HashMap<String, StartedList>,
}

impl Default for Store {
    fn default() -> Self {
        Self {
            nodes: Arc::default(),
            pods: BTreeMap::new(),
            // A number that occurs nowhere else.
            version: 1000,
            forgotten: 0,
            events: VecDeque::new(),
            late: None,
            lists: HashMap::new(),
        }
    }
}

impl Store {
    /// The nodes in the store.
    pub(crate) fn stored(&self) -> NodesAt {
        NodesAt { nodes: Arc::clone(&self.nodes), version: self.version }
    }

    /// The nodes in the server's cache.
    pub(crate) fn cached(&self) -> NodesAt {
        self.late.clone().unwrap_or_else(|| self.stored())
    }

    /// From now on the cache gets no changes.
    pub(crate) fn delay(&mut self) {
        self.late = Some(self.cached());
    }

    pub(crate) fn node(&self, name: &str) -> Option<Value> {
        Some(serde_json::from_str(self.nodes.get(name)?).expect("what was put in is JSON"))
    }

    pub(crate) fn put(&mut self, name: &str, mut node: Value) -> u64 {
        let version = self.version + 1;
        let object = node.as_object_mut().expect("a node is an object");
        object.insert("kind".to_owned(), json!("Node"));
        object.insert("apiVersion".to_owned(), json!("v1"));
        let metadata = object
            .entry("metadata")
            .or_insert(json!({}))
            .as_object_mut()
            .expect("metadata is an object");
        metadata.insert("name".to_owned(), json!(name));
        metadata.insert("resourceVersion".to_owned(), json!(version.to_string()));
        metadata.entry("uid").or_insert(json!(format!("uid-{version}")));
        metadata.entry("creationTimestamp").or_insert(json!("2026-11-21T20:00:00Z"));
        let kind = if self.nodes.contains_key(name) { "MODIFIED" } else { "ADDED" };
        self.write(name, &node.to_string(), kind)
    }

    pub(crate) fn heartbeat(&mut self, name: &str) -> u64 {
        let text = self.nodes.get(name).expect("the node exists");
        let field = "\"resourceVersion\":\"";
        let from = text.find(field).expect("a node has a version") + field.len();
        let len = text[from..].find('"').expect("a version ends");
        let text = format!("{}{}{}", &text[..from], self.version + 1, &text[from + len..]);
        self.write(name, &text, "MODIFIED")
    }

    fn write(&mut self, name: &str, text: &str, kind: &str) -> u64 {
        Arc::make_mut(&mut self.nodes).insert(name.to_owned(), text.into());
        self.emit(kind, text)
    }

    pub(crate) fn delete(&mut self, name: &str) -> u64 {
        let Some(mut node) = self.node(name) else { return self.version };
        node["metadata"]["resourceVersion"] = json!((self.version + 1).to_string());
        Arc::make_mut(&mut self.nodes).remove(name);
        self.emit("DELETED", &node.to_string())
    }

    fn emit(&mut self, kind: &str, text: &str) -> u64 {
        self.version += 1;
        let line = format!("{{\"type\":\"{kind}\",\"object\":{text}}}\n");
        self.events.push_back(StoredEvent { version: self.version, line: line.into() });
        if self.events.len() > HISTORY
            && let Some(event) = self.events.pop_front()
        {
            self.forgotten = event.version;
        }
        self.version
    }

    pub(crate) fn forget(&mut self) {
        self.events.clear();
        self.lists.clear();
        // A version that no client knows yet.
        self.version += 1;
        self.forgotten = self.version - 1;
    }

    /// Brings back the nodes of an earlier version, without events.
    pub(crate) fn restore(&mut self, content: NodesAt) {
        self.events.clear();
        self.lists.clear();
        self.nodes = content.nodes;
        self.version = content.version;
        self.forgotten = 0;
    }

    /// A strategic merge patch of a node's status.
    ///
    /// # Errors
    /// The part that flannel's patches must not have.
    pub(crate) fn patch(&mut self, name: &str, patch: &Value) -> Result<u64, String> {
        let mut node = self.node(name).ok_or("there is no such node")?;
        for (field, value) in patch.as_object().ok_or("a patch is an object")? {
            let value = value.as_object().ok_or_else(|| format!("{field} is not an object"))?;
            for (inner, value) in value {
                match (field.as_str(), inner.as_str()) {
                    ("metadata", "annotations") => merge_annotations(&mut node, value)?,
                    ("status", "conditions") => merge_conditions(&mut node, value)?,
                    _ => return Err(format!("flannel must not write {field}.{inner}")),
                }
            }
        }
        Ok(self.put(name, node))
    }
}

fn merge_annotations(node: &mut Value, patch: &Value) -> Result<(), String> {
    let annotations = &mut node["metadata"]["annotations"];
    if annotations.is_null() {
        *annotations = json!({});
    }
    let annotations = annotations.as_object_mut().ok_or("annotations are an object")?;
    for (name, value) in patch.as_object().ok_or("annotations are an object")? {
        match value {
            Value::Null => _ = annotations.remove(name),
            Value::String(_) => _ = annotations.insert(name.clone(), value.clone()),
            _ => return Err(format!("annotation {name} is not a string")),
        }
    }
    Ok(())
}

/// Conditions are merged by their type.
fn merge_conditions(node: &mut Value, patch: &Value) -> Result<(), String> {
    if node["status"]["conditions"].is_null() {
        node["status"]["conditions"] = json!([]);
    }
    let conditions =
        node["status"]["conditions"].as_array_mut().ok_or("conditions are an array")?;
    for condition in patch.as_array().ok_or("conditions are an array")? {
        for field in
            ["type", "status", "reason", "message", "lastHeartbeatTime", "lastTransitionTime"]
        {
            if !condition[field].is_string() {
                return Err(format!("condition without {field}"));
            }
        }
        match conditions.iter_mut().find(|old| old["type"] == condition["type"]) {
            Some(old) => *old = condition.clone(),
            None => conditions.push(condition.clone()),
        }
    }
    Ok(())
}
