//! The answers to requests. `flannel-api` lists them.
//!
//! A `GET` changes nothing. Every user who may open the socket may read; `--control-group` allows
//! more users to open it. Only root and the daemon's own user may send a `POST`, whatever the mode
//! of the socket. The kernel reports the user of the client.
//!
//! **Source**: flannel `main.go: mustRunHealthz`, for paths and first lines of the health answers.

use std::net::IpAddr;

use crate::http::{Request, Response, Site, json, parameter, refusal, response, text};
use async_trait::async_trait;
use flannel_api::{
    LogReport, More, PathsReport, PeersReport, ReloadReport, StatusReport, TrialReport, VERSION,
};
use flannel_core::Config;
use flannel_doctor::checks::host::HostReport;
use flannel_doctor::finding::reports;
use flannel_doctor::paths::Paths;
use flannel_options::printable;
use hyper::header::ACCEPT;
use hyper::{Method, StatusCode};
use serde::Serialize;

use crate::metrics::{Format, metrics};
use crate::observe::Observer;
use crate::report::problems::problems;
use crate::report::why::why;
use crate::report::{host, peers, status_report};

/// Answers requests.
pub(super) struct Answers {
    observer: Observer,
    /// The control API is served too.
    control: bool,
    /// Held during a reload, of which one runs at a time.
    reloading: tokio::sync::Mutex<()>,
}

#[async_trait]
impl Site for Answers {
    async fn answer(&self, request: &Request) -> Response {
        match (request.method().as_str(), request.uri().path()) {
            ("GET", "/healthz") => text(StatusCode::OK, "flanneld is running"),
            ("GET", "/readyz") => self.ready(),
            ("GET", "/metrics") => {
                let accept = request.headers().get(ACCEPT);
                let accept = accept.and_then(|value| value.to_str().ok()).unwrap_or_default();
                let format = Format::accepted(accept);
                let snapshot = self.observer.snapshot().with_tunnels().await.with_traffic().await;
                let body = metrics(&snapshot, format);
                response(StatusCode::OK, format.content_type(), body)
            }
            ("GET" | "POST", path) if self.control && path.starts_with("/v1/") => {
                self.control(request).await
            }
            ("GET" | "POST", path) => {
                text(StatusCode::NOT_FOUND, format!("there is no {path} here\n"))
            }
            (method, _) => {
                text(StatusCode::METHOD_NOT_ALLOWED, format!("{method} is not supported here\n"))
            }
        }
    }
}

impl Answers {
    pub(super) fn new(observer: &Observer, control: bool) -> Self {
        Self { observer: observer.clone(), control, reloading: tokio::sync::Mutex::default() }
    }

    fn ready(&self) -> Response {
        let problems = problems(&self.observer.snapshot());
        let errors = problems.iter().filter(|problem| problem.is_error());
        let reasons: Vec<_> = errors.map(|problem| printable::inline(&problem.text)).collect();
        match reasons.as_slice() {
            [] => text(StatusCode::OK, "flanneld is ready"),
            reasons => text(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("flanneld is not ready yet\n{}\n", reasons.join("\n")),
            ),
        }
    }

    async fn control(&self, request: &Request) -> Response {
        if request.method() == Method::POST && !may_write(*request.body()) {
            let own = nix::unistd::geteuid();
            return refusal(
                StatusCode::FORBIDDEN,
                format!("only root and user {own}, which flanneld runs as, may make changes"),
            );
        }
        match (request.method().as_str(), request.uri().path()) {
            ("GET", "/v1/status") => {
                let fresh = parameter(request, "fresh").is_some_and(|fresh| fresh == "true");
                answer(&self.status(fresh).await)
            }
            ("GET", "/v1/peers") => {
                let peers = peers(&self.observer.snapshot_of_peers().await.with_tunnels().await);
                answer(&PeersReport { version: VERSION, peers, more: More::new() })
            }
            ("GET", "/v1/paths") => {
                let paths = self.observer.paths();
                let summary = paths.as_ref().map(Paths::summary);
                let deployment = self.observer.snapshot().deployment();
                let paths = paths.map_or_else(Vec::new, |paths| paths.report(deployment));
                answer(&PathsReport { version: VERSION, summary, paths, more: More::new() })
            }
            ("GET", "/v1/why") => {
                let text = parameter(request, "address").unwrap_or_default();
                match text.parse::<IpAddr>() {
                    Ok(address) => {
                        let snapshot = self.observer.snapshot().with_tunnels().await;
                        self.observer.legacy().forget().await;
                        answer(&why(&snapshot, self.observer.legacy(), address).await)
                    }
                    Err(_) => refusal(
                        StatusCode::BAD_REQUEST,
                        format!(
                            "address is {text:?}, expected an IP address, as in \
                             /v1/why?address=10.1.7.9"
                        ),
                    ),
                }
            }
            ("POST", "/v1/reload") => match self.reloading.try_lock() {
                Ok(_reloading) => {
                    let found = self.observer.reload().await;
                    answer(&ReloadReport { version: VERSION, found, more: More::new() })
                }
                Err(_) => refusal(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "a reload is already running, and the store has not answered yet",
                ),
            },
            ("POST", "/v1/trial") => self.try_config(request).await,
            ("POST", "/v1/log") => self.set_log(request),
            (method, path) => refusal(
                StatusCode::NOT_FOUND,
                format!("this daemon has no {method} {path}; its API has version {VERSION}"),
            ),
        }
    }

    async fn status(&self, fresh: bool) -> StatusReport {
        let snapshot = self.observer.snapshot_of_peers().await.with_traffic().await;
        if fresh {
            self.observer.legacy().forget().await;
        }
        let HostReport { findings, unread } = host::look(&snapshot, self.observer.legacy()).await;
        let findings = reports(&findings, snapshot.deployment());
        StatusReport { findings, unread, ..status_report(&snapshot) }
    }

    async fn try_config(&self, request: &Request) -> Response {
        let in_kubernetes = self.observer.snapshot().store_kind().is_kubernetes();
        let parse = if in_kubernetes { Config::parse_undivided } else { Config::parse };
        match parse(&parameter(request, "config").unwrap_or_default()) {
            Ok(config) => {
                let result = self.observer.try_config(config).await;
                let tried = result.is_some();
                let (warnings, obstacle) = match result {
                    Some(Err(obstacle)) => (Vec::new(), Some(obstacle)),
                    answered => (answered.and_then(Result::ok).unwrap_or_default(), None),
                };
                let more = More::new();
                answer(&TrialReport { version: VERSION, tried, obstacle, warnings, more })
            }
            Err(error) => refusal(StatusCode::BAD_REQUEST, format!("config: {error}")),
        }
    }

    fn set_log(&self, request: &Request) -> Response {
        let Some(filter) = parameter(request, "filter") else {
            let error = "filter is missing, expected a value of --log, as in /v1/log?filter=debug";
            return refusal(StatusCode::BAD_REQUEST, error);
        };
        match self.observer.set_log(Some(&filter)) {
            Ok(()) => {
                tracing::info!(%filter, "the log filter is set, until SIGHUP or a reload");
                answer(&LogReport { version: VERSION, filter, more: More::new() })
            }
            Err(error) => refusal(StatusCode::BAD_REQUEST, error),
        }
    }
}

/// Whether the client may change something: root, and the daemon's own user.
fn may_write(uid: Option<u32>) -> bool {
    uid.is_some_and(|uid| uid == 0 || uid == nix::unistd::geteuid().as_raw())
}

fn answer(report: &impl Serialize) -> Response {
    json(StatusCode::OK, report)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use flannel_core::kernel::{Changes, KernelError, Outcome, PacketCount, RecordKeeper, Traffic};
    use flannel_core::object::{Change, Record};
    use flannel_core::status::Status;

    use super::*;
    use crate::observe::tests::network;

    fn request(method: &str, target: &str, uid: Option<u32>) -> Request {
        hyper::Request::builder().method(method).uri(target).body(uid).unwrap()
    }

    async fn ask(site: &Answers, method: &str, target: &str) -> (u16, String) {
        let response = site.answer(&request(method, target, Some(0))).await;
        (response.status().as_u16(), response.into_body())
    }

    #[tokio::test]
    async fn health_answers_match_go_flannel_and_readiness_has_reasons() {
        let observer = Observer::default();
        let site = Answers::new(&observer, false);
        assert_eq!(ask(&site, "GET", "/healthz").await, (200, "flanneld is running".to_owned()));
        let (status, body) = ask(&site, "GET", "/readyz").await;
        assert_eq!((status, body.lines().next()), (503, Some("flanneld is not ready yet")));
        assert!(body.contains("no network runs"), "{body}");
        let mut status = Status::default();
        status.in_sync = true;
        status.live = true;
        let _guard = observer.running(network(status).await.1);
        let (status, body) = ask(&site, "GET", "/readyz").await;
        assert!(
            status == 503 && body.contains("does not hold its lease"),
            "no store has given one: {body}"
        );
        assert_eq!(ask(&site, "GET", "/v1/status").await.0, 404, "not over TCP");
        assert_eq!(ask(&site, "POST", "/v1/reload").await.0, 404);
        assert_eq!(ask(&site, "DELETE", "/healthz").await.0, 405);
    }

    #[tokio::test]
    async fn every_answer_of_the_control_api_has_the_version() {
        let site = Answers::new(&Observer::default(), true);
        for (method, target, status) in [
            ("GET", "/v1/status", 200),
            ("POST", "/v1/status", 404),
            ("GET", "/v1/peers", 200),
            ("GET", "/v1/paths", 200),
            ("GET", "/v1/why?address=10.1.7.9", 200),
            ("GET", "/v1/why?address=x", 400),
            ("GET", "/v1/reload", 404),
            ("POST", "/v1/reload", 200),
            ("POST", "/v1/log?filter=debug", 400),
            ("GET", "/v2/status", 404),
        ] {
            let (got, body) = ask(&site, method, target).await;
            assert_eq!(got, status, "{method} {target}: {body}");
            if target.starts_with("/v1/") {
                let body: serde_json::Value = serde_json::from_str(&body).unwrap();
                assert_eq!(body["version"], VERSION, "{target}");
            }
        }
    }

    #[tokio::test]
    async fn other_users_may_only_read() {
        let site = Answers::new(&Observer::default(), true);
        let own = nix::unistd::geteuid().as_raw();
        for (uid, writes) in [(Some(0), 200), (Some(own), 200), (Some(own + 1), 403), (None, 403)] {
            let ask = async |method, target| {
                site.answer(&request(method, target, uid)).await.status().as_u16()
            };
            assert_eq!(ask("GET", "/v1/status").await, 200, "{uid:?}");
            assert_eq!(ask("POST", "/v1/reload").await, writes, "{uid:?}");
        }
    }

    #[tokio::test]
    async fn a_second_reload_is_refused_while_the_first_waits() {
        let site = Answers::new(&Observer::default(), true);
        let first = site.reloading.lock().await;
        let (status, body) = ask(&site, "POST", "/v1/reload").await;
        assert!(status == 503 && body.contains("already"), "{status} {body}");
        drop(first);
        assert_eq!(ask(&site, "POST", "/v1/reload").await.0, 200);
    }

    /// A data plane that counts how often it is asked for its counters.
    #[derive(Debug, Default)]
    struct Asked(AtomicU32);

    impl RecordKeeper for Asked {
        fn name(&self) -> &'static str {
            "asked"
        }

        fn records(&self) -> Result<Vec<Record>, KernelError> {
            Ok(Vec::new())
        }

        fn apply(&self, _: &[Change]) -> Vec<Outcome> {
            Vec::new()
        }

        fn changes(&self) -> Result<Box<dyn Changes>, KernelError> {
            Err(KernelError::explained(95, "it has no changes"))
        }

        fn traffic(&self) -> Option<Traffic> {
            let asked = self.0.fetch_add(1, Ordering::Relaxed) + 1;
            let moved = Some(PacketCount { packets: asked.into(), bytes: 0 });
            Some(Traffic { sent: moved, received: moved, ..Traffic::default() })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn many_requests_read_the_counters_once_a_second() {
        let observer = Observer::default();
        let asked = Arc::new(Asked::default());
        let (_subnets, mut running) = network(Status::default()).await;
        running.record_keepers = vec![Arc::clone(&asked) as Arc<dyn RecordKeeper>];
        let guard = observer.running(running);
        let site = Arc::new(Answers::new(&observer, true));
        let sent = |n: u32| format!("flannel_data_plane_packets_total{{direction=\"sent\"}} {n}\n");
        for second in 1..=3 {
            let requests: Vec<_> = (0..50)
                .map(|n| {
                    let site = Arc::clone(&site);
                    let target = if n % 2 == 0 { "/metrics" } else { "/v1/status" };
                    tokio::spawn(async move { (target, ask(&site, "GET", target).await) })
                })
                .collect();
            for request in requests {
                let (target, (status, body)) = request.await.unwrap();
                assert_eq!(status, 200, "{target}: {body}");
                assert!(target != "/metrics" || body.contains(&sent(second)), "{body}");
            }
            assert_eq!(asked.0.load(Ordering::Relaxed), second);
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        // The next network has other counters.
        drop(guard);
        let other = Arc::new(Asked::default());
        let (_subnets, mut running) = network(Status::default()).await;
        running.record_keepers = vec![Arc::clone(&other) as Arc<dyn RecordKeeper>];
        let _guard = observer.running(running);
        let (_, body) = ask(&site, "GET", "/metrics").await;
        assert!(body.contains(&sent(1)), "{body}");
    }
}
