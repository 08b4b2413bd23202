//! The server of these tests is strict: a request that flannel must not send fails and is recorded.

use std::io::{Read, Write};
use std::net::TcpStream;

use flannel_subnet_kube::testing::ApiServer;

use crate::fixture::{PREFIX, blank};

const STRATEGIC: &str = "application/strategic-merge-patch+json";

/// Sends these bytes as one request, and returns the status of the answer.
fn ask(server: &ApiServer, method: &str, path: &str, kind: &str, body: &str) -> u16 {
    let url = server.url();
    let mut connection = TcpStream::connect(url.strip_prefix("http://").unwrap()).unwrap();
    let length = body.len();
    write!(
        connection,
        "{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\
         Content-Type: {kind}\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).unwrap();
    answer.split(' ').nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_request_that_flannel_must_not_send_is_refused_and_recorded() {
    let server = ApiServer::new();
    server.put_node("me", blank(&["10.1.1.0/24"]));
    let patch = format!(r#"{{"metadata":{{"annotations":{{"{PREFIX}backend-type":"vxlan"}}}}}}"#);
    let own = "/api/v1/nodes/me/status";
    let watch = "/api/v1/nodes?watch=true&allowWatchBookmarks=true&timeoutSeconds=1";
    let before = server.node("me");
    for (method, path, kind, body, status, violation) in [
        ("PATCH", own, "application/merge-patch+json", &*patch, 415, "a patch of type"),
        ("PATCH", own, "application/json-patch+json", "[]", 415, "a patch of type"),
        ("PATCH", own, STRATEGIC, "{", 400, "a patch that is not JSON"),
        (
            "PATCH",
            own,
            STRATEGIC,
            r#"{"spec":{"podCIDR":"10.1.9.0/24"}}"#,
            422,
            "must not write spec.podCIDR",
        ),
        (
            "PATCH",
            own,
            STRATEGIC,
            r#"{"metadata":{"annotations":{"a":7}}}"#,
            422,
            "annotation a is not a string",
        ),
        (
            "PATCH",
            own,
            STRATEGIC,
            r#"{"status":{"conditions":[{"type":"x"}]}}"#,
            422,
            "condition without status",
        ),
        (
            "PATCH",
            "/api/v1/nodes/me",
            STRATEGIC,
            &patch,
            404,
            "must not send PATCH /api/v1/nodes/me",
        ),
        ("PATCH", "/api/v1/nodes", STRATEGIC, &patch, 404, "must not send PATCH /api/v1/nodes"),
        ("PUT", own, "application/json", &patch, 404, "must not send PUT /api/v1/nodes/me/status"),
        ("GET", "/api/v1/secrets?limit=500", "", "", 404, "must not send GET /api/v1/secrets"),
        ("GET", watch, "", "", 400, "a watch without a resourceVersion"),
        ("GET", &format!("{watch}&resourceVersion=999999"), "", "", 400, "does not exist yet"),
        (
            "GET",
            "/api/v1/nodes?watch=true&resourceVersion=1001&timeoutSeconds=1",
            "",
            "",
            400,
            "without bookmarks",
        ),
        (
            "GET",
            "/api/v1/nodes?watch=true&resourceVersion=1001&allowWatchBookmarks=true",
            "",
            "",
            400,
            "without timeoutSeconds",
        ),
        ("GET", "/api/v1/nodes", "", "", 400, "a list without a limit"),
        ("GET", "/api/v1/nodes?limit=0", "", "", 400, "a list without a limit"),
        (
            "GET",
            "/api/v1/nodes?limit=5&continue=x&resourceVersion=0",
            "",
            "",
            400,
            "must not have a resourceVersion",
        ),
        (
            "GET",
            "/api/v1/nodes?limit=5&resourceVersion=1001",
            "",
            "",
            400,
            "without resourceVersionMatch",
        ),
        (
            "GET",
            "/api/v1/nodes?resourceVersion=1001&resourceVersionMatch=Exact",
            "",
            "",
            400,
            "without resourceVersionMatch",
        ),
        (
            "GET",
            "/api/v1/nodes?limit=5&resourceVersionMatch=NotOlderThan",
            "",
            "",
            400,
            "without resourceVersionMatch",
        ),
        (
            "GET",
            "/api/v1/nodes?limit=5&resourceVersion=1001&resourceVersionMatch=NotOlderThan",
            "",
            "",
            400,
            "would read its store",
        ),
        (
            "GET",
            "/api/v1/nodes?resourceVersion=x&resourceVersionMatch=NotOlderThan",
            "",
            "",
            400,
            "without a limit",
        ),
    ] {
        assert_eq!(ask(&server, method, path, kind, body), status, "{method} {path} {kind}");
        let violations = server.take_violations();
        assert!(
            violations.len() == 1 && violations[0].contains(violation),
            "{method} {path}: {violations:?}"
        );
        assert_eq!(server.node("me"), before, "nothing was changed");
    }
    for (method, path, kind, body, status) in [
        ("PATCH", own, STRATEGIC, &*patch, 200),
        ("PATCH", "/api/v1/nodes/other/status", STRATEGIC, &patch, 404),
        ("GET", "/api/v1/nodes/me", "", "", 200),
        ("GET", "/api/v1/nodes/other", "", "", 404),
        ("GET", "/api/v1/nodes?limit=500", "", "", 200),
        ("GET", "/api/v1/nodes?limit=500&resourceVersion=0", "", "", 200),
        (
            "GET",
            "/api/v1/nodes?resourceVersion=1001&resourceVersionMatch=NotOlderThan",
            "",
            "",
            200,
        ),
        (
            "GET",
            "/api/v1/nodes?resourceVersion=9999&resourceVersionMatch=NotOlderThan",
            "",
            "",
            504,
        ),
        ("GET", &format!("{watch}&resourceVersion=1001"), "", "", 200),
        ("GET", "/api/v1/nodes?limit=5&continue=x", "", "", 410),
    ] {
        assert_eq!(ask(&server, method, path, kind, body), status, "{method} {path}");
        assert_eq!(server.take_violations(), [""; 0], "{method} {path}");
    }
}

#[test]
#[should_panic(expected = "a list without a limit")]
fn an_unread_violation_fails_the_test() {
    let server = ApiServer::new();
    ask(&server, "GET", "/api/v1/nodes", "", "");
}
