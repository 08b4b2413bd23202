use std::fs;
use std::path::Path;

use flannel_core::object::Object;

use super::*;
use crate::commands::{Keepers, Words};

const PATIENCE: Duration = Duration::from_secs(60);
const NAMES: Names = Names { keeper: "mine", node: ["Begin", "End"], peer: ["Join", "Leave"] };

fn subnet(n: u8) -> Subnet {
    format!("10.1.{n}.0/24").parse().unwrap()
}

fn shell(script: &str) -> Option<Words> {
    Some(["sh", "-c", script].into_iter().collect())
}

/// A directory for tasks, and a log of the commands that ran.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn keeper(&self) -> Commands {
        Commands::new(NAMES, Some(self.0.path().join("tasks")))
    }

    /// Notes `name`, after the script.
    fn noted(&self, script: &str, name: &str) -> Option<Words> {
        shell(&format!("{script}echo {name} >>{}", self.path("log")))
    }

    fn ran(&self) -> Vec<String> {
        let log = fs::read_to_string(self.0.path().join("log")).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }

    fn task(&self, of: Of, name: &str) -> Task {
        let (variables, input) = Default::default();
        let add = self.noted("", &format!("+{name}"));
        let remove = self.noted("", &format!("-{name}"));
        Task { of, variables, input, add, remove, timeout: 60, waits: false }
    }
}

fn object(n: u8, task: &Task) -> Object {
    task.record(NAMES.keeper, subnet(n)).into()
}

/// Starts a change.
fn start(commands: &Commands, change: Change) {
    assert_eq!(commands.apply(&[change]), [Outcome::Started]);
}

/// Makes a change.
fn make(commands: &Commands, change: Change) -> Result<(), String> {
    let key = change.object().key();
    start(commands, change);
    commands.wait(&key, PATIENCE).into_result().map_err(|error| error.to_string())
}

fn records(commands: &Commands) -> Vec<String> {
    commands.records().unwrap().iter().map(ToString::to_string).collect()
}

#[test]
fn the_task_of_this_node_comes_before_those_of_peers_that_wait() {
    let place = Place::new();
    let commands = place.keeper();
    let peer = Task { waits: true, ..place.task(Of::Peer, "waiting") };
    let go = place.path("go");
    let blocked = format!("until [ -e {go} ]; do sleep 0.01; done; ");
    let node = Task { add: place.noted(&blocked, "+node"), ..place.task(Of::Node, "node") };
    let [peer, node] = [object(1, &peer), object(2, &node)];
    start(&commands, Change::Put(peer.clone()));
    start(&commands, Change::Put(node.clone()));
    make(&commands, Change::Put(object(3, &place.task(Of::Peer, "free")))).unwrap();
    assert!(!commands.lock().entries[&subnet(1)].runs, "the node's command runs");
    assert_eq!(commands.wait(&peer.key(), Duration::ZERO), Outcome::Started);
    fs::write(go, "").unwrap();
    for object in [node, peer] {
        assert_eq!(commands.wait(&object.key(), PATIENCE), Outcome::Done);
    }
    assert_eq!(place.ran(), ["+free", "+node", "+waiting"]);
}

#[test]
fn a_removal_that_fails_is_given_up_after_five_failures_and_ten_seconds() {
    let place = Place::new();
    let commands = place.keeper();
    let task = Task { remove: shell("echo why; false"), ..place.task(Of::Peer, "peer") };
    let object = object(1, &task);
    make(&commands, Change::Put(object.clone())).unwrap();
    let remove = || make(&commands, Change::Delete(object.clone()));
    let long_ago = Instant::now().checked_sub(Duration::from_secs(10)).unwrap();
    for before in 0..5 {
        assert!(remove().unwrap_err().ends_with("Leave: exit status: 1: why"));
        let mut inner = commands.lock();
        let removals = &mut inner.entries.get_mut(&subnet(1)).unwrap().removals;
        let (count, since) = removals.unwrap();
        assert_eq!(count, before + 1);
        // All but the last but one are long ago, so neither limit is enough alone.
        *removals = Some((count, if before == 3 { Instant::now() } else { long_ago.min(since) }));
    }
    assert_eq!((remove(), records(&commands)), (Ok(()), vec![]));
    assert_eq!(records(&place.keeper()), [""; 0], "no file is left");
}

#[test]
fn a_restart_adopts_the_tasks_of_peers_and_runs_that_of_this_node_again() {
    let place = Place::new();
    let [node, peer] = [(1, place.task(Of::Node, "node")), (2, place.task(Of::Peer, "peer"))];
    let objects = [object(node.0, &node.1), object(peer.0, &peer.1)];
    let first = place.keeper();
    for object in &objects {
        make(&first, Change::Put(object.clone())).unwrap();
    }
    let shown = |commands: &Commands| {
        let are_wanted = |record| objects.contains(&Object::from(record));
        commands.records().unwrap().into_iter().map(are_wanted).collect::<Vec<_>>()
    };
    assert_eq!(shown(&first), [true, true]);
    let second = place.keeper();
    assert_eq!(shown(&second), [false, true], "the engine puts that of this node again");
    for object in &objects {
        make(&second, Change::Put(object.clone())).unwrap();
    }
    assert_eq!(shown(&second), [true, true]);
    make(&place.keeper(), Change::Delete(objects[1].clone())).unwrap();
    assert_eq!(place.ran(), ["+node", "+peer", "+node", "-peer"]);
}

#[test]
fn errors_have_the_names_of_the_commands() {
    let place = Place::new();
    let commands = place.keeper();
    for (of, name) in [(Of::Node, "Begin"), (Of::Peer, "Join")] {
        let task = Task { add: shell("echo why; exit 3"), ..place.task(of, "it") };
        let error = make(&commands, Change::Put(object(1, &task))).unwrap_err();
        assert!(error.ends_with(&format!("{name}: exit status: 3: why")), "{error}");
    }
}

#[test]
fn a_record_of_another_record_keeper_is_refused() {
    let place = Place::new();
    let commands = place.keeper();
    let object = Object::from(place.task(Of::Peer, "peer").record("other", subnet(1)));
    let key = object.key();
    let changes = [Change::Put(object.clone()), Change::Delete(object)];
    let mut outcomes = commands.apply(&changes);
    outcomes.push(commands.wait(&key, PATIENCE));
    for outcome in outcomes {
        let error = outcome.into_result().unwrap_err();
        let text = error.to_string();
        assert!(error.is(EINVAL));
        assert!(text.contains("of the keeper other, expected one of mine"), "{text}");
    }
    assert!(commands.lock().entries.is_empty());
}

#[test]
fn a_stop_kills_the_commands_that_run_and_removes_the_task_of_this_node() {
    let place = Place::new();
    let commands = place.keeper();
    make(&commands, Change::Put(object(1, &place.task(Of::Node, "node")))).unwrap();
    make(&commands, Change::Put(object(2, &place.task(Of::Peer, "peer")))).unwrap();
    let begun = place.path("begun");
    let endless = shell(&format!("touch {begun}; sleep 1000"));
    let endless = object(3, &Task { add: endless, ..place.task(Of::Peer, "endless") });
    start(&commands, Change::Put(endless.clone()));
    test_support::eventually(PATIENCE, || Path::new(&begun).exists(), || "no command");
    commands.stop();
    let error =
        commands.wait(&endless.key(), Duration::ZERO).into_result().unwrap_err().to_string();
    assert!(error.ends_with("Join: it was ended, because the keeper stops"), "{error}");
    let refused = commands.apply(&[Change::Put(endless)]);
    assert!(matches!(&refused[..], [Outcome::Failed(_)]), "{refused:?}");
    assert_eq!(place.ran(), ["+node", "+peer", "-node"], "peers stay");
}

#[test]
fn a_name_and_a_directory_have_one_record_keeper() {
    let place = Place::new();
    let record_keepers = Keepers::new();
    let one = record_keepers.keeper(NAMES, None);
    make(&one, Change::Put(object(1, &place.task(Of::Peer, "peer")))).unwrap();
    let count = |names, dir| records(&record_keepers.keeper(names, dir)).len();
    assert_eq!(count(NAMES, None), 1);
    assert_eq!(count(Names { keeper: "other", ..NAMES }, None), 0);
    assert_eq!(count(NAMES, Some(place.0.path().join("tasks"))), 0);
}

#[test]
fn after_a_stop_the_directory_has_a_new_record_keeper() {
    let place = Place::new();
    let record_keepers = Keepers::new();
    let dir = || Some(place.0.path().join("tasks"));
    let first = record_keepers.keeper(NAMES, dir());
    make(&first, Change::Put(object(1, &place.task(Of::Node, "node")))).unwrap();
    make(&first, Change::Put(object(2, &place.task(Of::Peer, "peer")))).unwrap();
    first.stop();
    let second = record_keepers.keeper(NAMES, dir());
    assert_eq!(records(&second).len(), 1, "the peer is still there");
    make(&second, Change::Put(object(1, &place.task(Of::Node, "node")))).unwrap();
    assert_eq!(place.ran(), ["+node", "+peer", "-node", "+node"]);
}

#[test]
fn debug_shows_no_words_input_and_variables() {
    let place = Place::new();
    let secret = "canary";
    let task = Task {
        variables: [(secret.to_owned(), secret.to_owned())].into(),
        input: secret.to_owned(),
        ..place.task(Of::Peer, secret)
    };
    let record_keepers = Keepers::new();
    let commands = record_keepers.keeper(NAMES, None);
    make(&commands, Change::Put(object(1, &task))).unwrap();
    let shown =
        format!("{:?} {task:?} {commands:?} {record_keepers:?}", task.add.as_ref().unwrap());
    assert!(!shown.contains(secret), "{shown}");
    assert!(shown.starts_with("Words(3) Task { of: Peer, timeout: 60, waits: false"), "{shown}");
    let inner = format!("{:?}", commands.lock());
    assert!(!inner.contains(secret), "{inner}");
}
