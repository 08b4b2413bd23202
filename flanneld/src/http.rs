//! HTTP/1.1 for Prometheus, a kubelet and `curl --unix-socket`: hyper, with limits.
//!
//! A connection carries one request. Every resource is bounded: the bytes of a request's head, the
//! time for each step, and the number of connections. A connection that has not sent a request is
//! closed for a new one, so that silent clients block no others. Bodies of requests are never read,
//! because no request needs one.

mod listen;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use flannel_api::{ErrorReport, VERSION};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use percent_encoding::percent_decode_str;
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until, timeout};

pub(crate) use listen::{listen, open_socket};

/// The maximum size of a request's head, in bytes: the minimum of hyper.
const MAX_HEAD: usize = 8 * 1024;
/// The time for a client to send the head of its request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// The time to compute an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The time for a client to read the answer.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// The largest number of open connections. For one more, the oldest without a request is closed. If
/// all have sent one, the new connection waits. hyper needs some 13 KiB for each.
const MAX_CONNECTIONS: usize = 16;
/// The minimum age of a connection that is closed for a new one. So at most 8,000 new connections
/// a second are accepted.
const GRACE: Duration = Duration::from_millis(2);
/// The pause after a failure to accept a connection, usually because of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A request. In place of a body it has the user id of the client, or `None` over TCP. The method
/// `HEAD` is replaced by `GET`.
pub(crate) type Request = hyper::Request<Option<u32>>;

/// A parameter of the query, decoded.
pub(crate) fn parameter(request: &Request, name: &str) -> Option<String> {
    let pairs = request.uri().query().unwrap_or_default().split('&');
    let mut pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let (_, value) = pairs.find(|(key, _)| *key == name)?;
    Some(percent_decode_str(value).decode_utf8_lossy().into_owned())
}

/// An answer.
pub(crate) type Response = hyper::Response<String>;

/// An answer with this `Content-Type`.
pub(crate) fn response(status: StatusCode, kind: &'static str, body: String) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// Plain text.
pub(crate) fn text(status: StatusCode, body: impl Into<String>) -> Response {
    response(status, "text/plain; charset=utf-8", body.into())
}

/// A value as JSON, on one line.
pub(crate) fn json(status: StatusCode, value: &impl Serialize) -> Response {
    let body = serde_json::to_string(value)
        .unwrap_or_else(|error| unreachable!("reports have only text keys: {error}"));
    response(status, "application/json", body + "\n")
}

/// The answer to a request for the control API that is refused.
pub(crate) fn refusal(status: StatusCode, error: impl Into<String>) -> Response {
    json(status, &ErrorReport { version: VERSION, error: error.into() })
}

/// Answers requests.
#[async_trait]
pub(crate) trait Site: Send + Sync {
    /// The answer to one request.
    async fn answer(&self, request: &Request) -> Response;
}

/// A socket that accepts connections.
#[derive(Debug)]
pub(crate) enum Listener {
    /// Its clients are unknown users.
    Tcp(TcpListener),
    /// The kernel reports the users of its clients.
    Unix(UnixListener),
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

impl Listener {
    /// The next connection, and over a Unix socket the user of the client.
    async fn accept(&self) -> std::io::Result<(Box<dyn Stream>, Option<u32>)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                Ok((Box::new(stream), None))
            }
            Self::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let uid = stream.peer_cred()?.uid();
                Ok((Box::new(stream), Some(uid)))
            }
        }
    }
}

/// Serves until it is dropped.
///
/// # Cancel safety
/// Dropping the future closes all connections.
pub(crate) async fn serve(listener: Listener, site: Arc<dyn Site>) -> Infallible {
    let mut connections = Connections::new();
    loop {
        match listener.accept().await {
            Ok((stream, uid)) => connections.add(stream, uid, Arc::clone(&site)).await,
            Err(error) => {
                tracing::debug!(%error, "a connection could not be accepted");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// The open connections, at most [`MAX_CONNECTIONS`].
struct Connections {
    tasks: JoinSet<()>,
    permits: Arc<Semaphore>,
    /// The connections that had not sent a request when they were last checked, the oldest first.
    silent: VecDeque<Silent>,
}

/// A connection that may not have sent a request.
struct Silent {
    task: AbortHandle,
    has_request: Arc<AtomicBool>,
    since: Instant,
}

impl Connections {
    fn new() -> Self {
        let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        Self { tasks: JoinSet::new(), permits, silent: VecDeque::new() }
    }

    /// Serves a connection, once there is room for it.
    async fn add(&mut self, stream: Box<dyn Stream>, uid: Option<u32>, site: Arc<dyn Site>) {
        let permit = self.permit().await;
        let has_request = Arc::<AtomicBool>::default();
        let connection = connection(stream, uid, Arc::clone(&has_request), site);
        let task = self.tasks.spawn(async move {
            connection.await;
            drop(permit);
        });
        self.silent.push_back(Silent { task, has_request, since: Instant::now() });
    }

    /// Makes room for one more.
    async fn permit(&mut self) -> OwnedSemaphorePermit {
        loop {
            while self.tasks.try_join_next().is_some() {}
            self.silent.retain(|connection| {
                !connection.has_request.load(Ordering::Relaxed) && !connection.task.is_finished()
            });
            if let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() {
                return permit;
            }
            match self.silent.front() {
                // Its request may have arrived without having been read.
                Some(oldest) if oldest.since.elapsed() < GRACE => {
                    sleep_until(oldest.since + GRACE).await;
                }
                Some(oldest) => {
                    oldest.task.abort();
                    self.silent.pop_front();
                    // The end of the task returns the permit.
                    self.tasks.join_next().await;
                }
                None => _ = self.tasks.join_next().await,
            }
        }
    }
}

/// One request and its answer. A client that goes away, or is too slow, is not an error.
async fn connection(
    stream: Box<dyn Stream>,
    uid: Option<u32>,
    has_request: Arc<AtomicBool>,
    site: Arc<dyn Site>,
) {
    let answered = Notify::new();
    let service = service_fn(async |request: hyper::Request<Incoming>| {
        has_request.store(true, Ordering::Relaxed);
        let (mut parts, _body) = request.into_parts();
        if parts.method == Method::HEAD {
            parts.method = Method::GET;
        }
        let response = respond(&*site, &Request::from_parts(parts, uid)).await;
        answered.notify_one();
        Ok::<_, Infallible>(response)
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_header_size(MAX_HEAD)
        .max_buf_size(MAX_HEAD)
        .keep_alive(false)
        .title_case_headers(true)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    tokio::select! {
        _ = &mut connection => {}
        () = answered.notified() => {
            let _ = timeout(WRITE_TIMEOUT, connection).await;
        }
    }
}

async fn respond(site: &dyn Site, request: &Request) -> Response {
    if !request.uri().path().starts_with('/') {
        return text(StatusCode::BAD_REQUEST, "the target of a request must be a path\n");
    }
    timeout(ANSWER_TIMEOUT, site.answer(request)).await.unwrap_or_else(|_| {
        let late = format!("there is no answer within {ANSWER_TIMEOUT:?}");
        if request.uri().path().starts_with("/v1/") {
            refusal(StatusCode::SERVICE_UNAVAILABLE, late)
        } else {
            text(StatusCode::SERVICE_UNAVAILABLE, late + "\n")
        }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    struct Echo;

    #[async_trait]
    impl Site for Echo {
        async fn answer(&self, request: &Request) -> Response {
            if request.uri().path().ends_with("/never") {
                std::future::pending::<()>().await;
            }
            if request.uri().path() == "/accept" {
                return text(StatusCode::OK, request.headers()["accept"].to_str().unwrap());
            }
            if request.uri().path() == "/large" {
                return text(StatusCode::OK, "x".repeat(1 << 20));
            }
            let says = parameter(request, "says").unwrap_or_default();
            let method = request.method();
            let path = request.uri().path();
            text(StatusCode::OK, format!("{method} {path} {says}"))
        }
    }

    async fn ask(text: &str) -> String {
        let (mut client, server) = duplex(64 * 1024);
        let site = Arc::new(Echo);
        let server = tokio::spawn(connection(Box::new(server), None, Arc::default(), site));
        client.write_all(text.as_bytes()).await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        server.await.unwrap();
        answer
    }

    #[tokio::test]
    async fn requests_are_answered_once() {
        let answer = ask("GET /x?a=b&says=%C3%A9+%2 HTTP/1.1\r\nHost: y\r\n\r\nrest").await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(answer.contains("Connection: close\r\n"), "{answer}");
        assert!(
            answer.contains("Content-Length: 12\r\n")
                && answer.ends_with("\r\n\r\nGET /x \u{e9}+%2"),
            "{answer}"
        );
        let answer = ask("HEAD /x HTTP/1.0\r\n\r\n").await;
        assert!(
            answer.contains("Content-Length: 7\r\n") && answer.ends_with("\r\n\r\n"),
            "{answer}"
        );
        let answer = ask("GET /accept HTTP/1.1\r\naccept: a/b;q=0.5, */*\r\n\r\n").await;
        assert!(answer.ends_with("\r\n\r\na/b;q=0.5, */*"), "{answer}");
        let request = Request::new(None);
        assert_eq!(parameter(&request, "says"), None);
        let request = hyper::Request::get("/?says=a%20b%26%C3%A9%3D%25").body(None).unwrap();
        assert_eq!(parameter(&request, "says").as_deref(), Some("a b&\u{e9}=%"));
    }

    #[tokio::test(start_paused = true)]
    async fn invalid_and_too_large_requests_are_refused() {
        for text in ["GET\r\n\r\n", "GET x HTTP/1.1\r\n\r\n", "GET / SPDY/3\r\n\r\n"] {
            assert!(ask(text).await.starts_with("HTTP/1.1 400 "), "{text:?}");
        }
        let long = "x".repeat(MAX_HEAD);
        for text in [
            long.clone(),
            format!("GET /{long} HTTP/1.1\r\n\r\n"),
            format!("GET / HTTP/1.1\r\na: {long}\r\n\r\n"),
        ] {
            assert!(ask(&text).await.starts_with("HTTP/1.1 431 "), "{text:?}");
        }
        let many = "a: b\r\n".repeat(101);
        let answer = ask(&format!("GET / HTTP/1.1\r\n{many}\r\n")).await;
        assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    }

    #[tokio::test(start_paused = true)]
    async fn each_step_has_a_time_limit() {
        let begin = Instant::now();
        for (n, text) in ["", "\r\n", "GET / HT"].into_iter().enumerate() {
            assert_eq!(ask(text).await, "");
            assert_eq!(begin.elapsed().as_secs(), HEAD_TIMEOUT.as_secs() * (n as u64 + 1));
        }
        let begin = Instant::now();
        assert!(ask("GET /never HTTP/1.1\r\n\r\n").await.starts_with("HTTP/1.1 503 "));
        assert_eq!(begin.elapsed().as_secs(), ANSWER_TIMEOUT.as_secs());
        // It is JSON, as every answer of the control API.
        let late = ask("GET /v1/never HTTP/1.1\r\n\r\n").await;
        let body = late.split_once("\r\n\r\n").unwrap().1;
        let body: ErrorReport = serde_json::from_str(body).unwrap();
        assert!(late.starts_with("HTTP/1.1 503 ") && body.error.contains("10s"), "{late}");
    }

    /// The answer does not fit into the pipe.
    #[tokio::test(start_paused = true)]
    async fn a_client_that_does_not_read_is_dropped() {
        let (mut client, server) = duplex(64);
        let begin = Instant::now();
        let request = b"GET /large HTTP/1.1\r\n\r\n";
        let site = Arc::new(Echo);
        let server = tokio::spawn(connection(Box::new(server), None, Arc::default(), site));
        client.write_all(request).await.unwrap();
        server.await.unwrap();
        assert_eq!(begin.elapsed().as_secs(), WRITE_TIMEOUT.as_secs());
    }

    /// Its bytes stay in the kernel.
    #[tokio::test]
    async fn the_body_of_a_request_is_not_read() {
        let (mut client, server) = duplex(16 * 1024);
        let site = Arc::new(Echo);
        let server = tokio::spawn(connection(Box::new(server), None, Arc::default(), site));
        client.write_all(b"POST /x HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n").await.unwrap();
        let mut sent = 0;
        while client.write_all(&[b'x'; 1024]).await.is_ok() {
            sent += 1024;
        }
        server.await.unwrap();
        assert!(sent <= 32 * 1024, "{sent}");
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("POST /x "), "{answer}");
    }

    /// Opens `number` connections that send `others`. Returns the time of one more request.
    async fn request_among(others: &str, number: usize) -> Duration {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = serve(Listener::Tcp(listener), Arc::new(Echo));
        let clients = async {
            let mut held = Vec::new();
            for _ in 0..number {
                let mut other = tokio::net::TcpStream::connect(address).await.unwrap();
                other.write_all(others.as_bytes()).await.unwrap();
                held.push(other);
            }
            let begin = Instant::now();
            let mut late = tokio::net::TcpStream::connect(address).await.unwrap();
            late.write_all(b"GET /late HTTP/1.1\r\n\r\n").await.unwrap();
            let mut answer = String::new();
            late.read_to_string(&mut answer).await.unwrap();
            assert!(answer.ends_with("GET /late "), "{answer}");
            begin.elapsed()
        };
        tokio::select! {
            never = server => match never {},
            took = clients => took,
        }
    }

    #[tokio::test]
    async fn silent_and_incomplete_connections_do_not_delay_other_requests() {
        for others in ["", "GET /healthz HT"] {
            let took = request_among(others, 4 * MAX_CONNECTIONS).await;
            // If the request had to wait for all of them, it would take four times HEAD_TIMEOUT.
            assert!(took < HEAD_TIMEOUT * 2, "{others:?}: {took:?}");
        }
    }

    /// Holds its answers until they are released, and counts them.
    struct Held {
        now: AtomicUsize,
        most: AtomicUsize,
        released: Semaphore,
    }

    #[async_trait]
    impl Site for Held {
        async fn answer(&self, _: &Request) -> Response {
            let now = self.now.fetch_add(1, Ordering::Relaxed) + 1;
            self.most.fetch_max(now, Ordering::Relaxed);
            drop(self.released.acquire().await);
            self.now.fetch_sub(1, Ordering::Relaxed);
            text(StatusCode::OK, "released")
        }
    }

    #[tokio::test]
    async fn the_number_of_concurrent_answers_is_limited_and_none_is_lost() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let site = Arc::new(Held {
            now: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
            released: Semaphore::new(0),
        });
        let server = serve(Listener::Tcp(listener), Arc::clone(&site) as Arc<dyn Site>);
        let clients = async {
            let mut all = Vec::new();
            for _ in 0..2 * MAX_CONNECTIONS {
                let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
                client.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
                all.push(client);
            }
            while site.now.load(Ordering::Relaxed) < MAX_CONNECTIONS {
                tokio::task::yield_now().await;
            }
            site.released.add_permits(1);
            for mut client in all {
                let mut answer = String::new();
                client.read_to_string(&mut answer).await.unwrap();
                assert!(answer.ends_with("released"), "{answer}");
            }
        };
        tokio::select! {
            never = server => match never {},
            () = clients => (),
        }
        assert_eq!(site.most.load(Ordering::Relaxed), MAX_CONNECTIONS);
    }
}
