//! The smallest HTTP/1.1 server that Prometheus, a kubelet and `curl --unix-socket` are content with.
//!
//! The one thing to know: one request for each connection, and everything is bounded: the bytes of a request, the
//! time that one takes, and how many there are at once. Who has said nothing yet gives way to who comes, so that silence keeps
//! nobody from an answer. A full HTTP library would be larger than all that it serves here.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, UnixListener};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// A request may have so many bytes.
const LONGEST: usize = 8 * 1024;
/// A client has so long to ask.
const ASKING: Duration = Duration::from_secs(5);
/// So long an answer may take to be found.
const ANSWERING: Duration = Duration::from_secs(10);
/// A client has so long to take the answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// There are so many connections at once. For one more the oldest that has not asked yet ends; if all have, it waits.
const MOST: usize = 64;
/// Nobody is shut out before.
const GRACE: Duration = Duration::from_millis(20);
/// After a connection could not be accepted (no file descriptors are left, mostly).
const PAUSE: Duration = Duration::from_millis(100);

/// What a client asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    /// `GET`, `POST`; `HEAD` counts as `GET`.
    pub(crate) method: String,
    /// Without the query.
    pub(crate) path: String,
    query: String,
    /// Who asks, as the kernel says; `None` over TCP.
    pub(crate) uid: Option<u32>,
}

impl Request {
    #[cfg(test)]
    pub(crate) fn new(method: &str, target: &str) -> Self {
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        Self {
            method: method.to_owned(),
            path: path.to_owned(),
            query: query.to_owned(),
            uid: None,
        }
    }

    #[cfg(test)]
    pub(crate) fn by(self, uid: Option<u32>) -> Self {
        Self { uid, ..self }
    }

    /// A parameter of the query, decoded.
    pub(crate) fn parameter(&self, name: &str) -> Option<String> {
        let pairs = self.query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        pairs.filter(|(key, _)| *key == name).map(|(_, value)| decode(value)).next()
    }
}

/// What it gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) kind: &'static str,
    pub(crate) body: String,
}

impl Response {
    /// Plain text.
    pub(crate) fn text(status: u16, body: impl Into<String>) -> Self {
        Self { status, kind: "text/plain; charset=utf-8", body: body.into() }
    }

    fn head(&self) -> String {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            403 => "Forbidden",
            404 => "Not Found",
            405 => "Method Not Allowed",
            503 => "Service Unavailable",
            _ => "Error",
        };
        format!(
            "HTTP/1.1 {} {reason}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            self.status,
            self.kind,
            self.body.len()
        )
    }
}

/// Who answers.
#[async_trait]
pub(crate) trait Site: Send + Sync {
    /// The answer to one request.
    async fn answer(&self, request: &Request) -> Response;
}

/// Where clients come from.
#[derive(Debug)]
pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

impl Listener {
    /// The next client, and over a Unix socket who it is.
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

/// Serves for ever.
///
/// # Cancel safety
/// Dropping the future ends all connections.
pub(crate) async fn serve(listener: Listener, site: Arc<dyn Site>) -> Infallible {
    let (mut tasks, mut clients) = (JoinSet::new(), VecDeque::<Client>::new());
    loop {
        let (stream, uid) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::debug!("a connection could not be accepted: {error}");
                sleep(PAUSE).await;
                continue;
            }
        };
        while tasks.try_join_next().is_some() {}
        make_room(&mut tasks, &mut clients).await;
        let asked = Arc::<AtomicBool>::default();
        let task = tasks.spawn(exchange(stream, uid, Arc::clone(&asked), Arc::clone(&site)));
        clients.push_back(Client { task, asked, since: Instant::now() });
    }
}

/// One connection, since when there is one, and whether it has said what it wants.
struct Client {
    task: AbortHandle,
    asked: Arc<AtomicBool>,
    since: Instant,
}

/// Makes sure that there is room for one more.
async fn make_room(tasks: &mut JoinSet<()>, clients: &mut VecDeque<Client>) {
    loop {
        clients.retain(|client| !client.task.is_finished());
        if clients.len() < MOST {
            return;
        }
        match clients.iter().position(|client| !client.asked.load(Ordering::Relaxed)) {
            // What it says may be here already, and nobody has read it yet.
            Some(oldest) if clients[oldest].since.elapsed() < GRACE => {
                sleep_until(clients[oldest].since + GRACE).await;
            }
            Some(oldest) => {
                if let Some(client) = clients.remove(oldest) {
                    client.task.abort();
                }
            }
            None => _ = tasks.join_next().await,
        }
    }
}

/// One request and its answer. That a client goes away, or takes too long, is its own affair.
async fn exchange(
    mut stream: Box<dyn Stream>,
    uid: Option<u32>,
    asked: Arc<AtomicBool>,
    site: Arc<dyn Site>,
) {
    let Ok(Some(head)) = timeout(ASKING, read_head(&mut stream)).await else { return };
    asked.store(true, Ordering::Relaxed);
    let (response, head_only) = match parse(&head) {
        Some((request, head_only)) => {
            let late =
                |_| Response::text(503, format!("there is no answer within {ANSWERING:?}\n"));
            let request = Request { uid, ..request };
            (timeout(ANSWERING, site.answer(&request)).await.unwrap_or_else(late), head_only)
        }
        None => (Response::text(400, "this is no HTTP request that is understood here\n"), false),
    };
    let write = async {
        stream.write_all(response.head().as_bytes()).await?;
        if !head_only {
            stream.write_all(response.body.as_bytes()).await?;
        }
        stream.shutdown().await
    };
    let _ = timeout(PATIENCE, write).await;
}

/// Everything up to the empty line. `None`: the client went away, or says too much.
async fn read_head(stream: &mut (dyn Stream + '_)) -> Option<String> {
    let (mut head, mut buffer) = (Vec::new(), [0; 1024]);
    while head.len() < LONGEST {
        let len = stream.read(&mut buffer).await.ok().filter(|len| *len > 0)?;
        head.extend_from_slice(&buffer[..len]);
        if let Some(end) = head.windows(4).position(|four| four == b"\r\n\r\n") {
            head.truncate(end);
            return String::from_utf8(head).ok();
        }
    }
    Some(String::new())
}

/// The request, and whether only the head of the answer is wanted.
fn parse(head: &str) -> Option<(Request, bool)> {
    let mut words = head.lines().next()?.split(' ');
    let (method, target, version) = (words.next()?, words.next()?, words.next()?);
    if words.next().is_some() || !version.starts_with("HTTP/1.") || !target.starts_with('/') {
        return None;
    }
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let head_only = method == "HEAD";
    let method = if head_only { "GET" } else { method };
    let [method, path, query] = [method, path, query].map(str::to_owned);
    Some((Request { method, path, query, uid: None }, head_only))
}

/// Undoes percent encoding; what is encoded wrongly stays as it is.
fn decode(text: &str) -> String {
    let (bytes, mut out, mut at) = (text.as_bytes(), Vec::new(), 0);
    while let Some(byte) = bytes.get(at) {
        let hex = |at: usize| bytes.get(at).and_then(|b| char::from(*b).to_digit(16));
        match (byte, hex(at + 1), hex(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                // Two hexadecimal digits fit.
                out.push((high * 16 + low) as u8);
                at += 2;
            }
            _ => out.push(*byte),
        }
        at += 1;
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;

    struct Echo;

    const SLOW: Duration = Duration::from_millis(500);

    #[async_trait]
    impl Site for Echo {
        async fn answer(&self, request: &Request) -> Response {
            if request.path == "/never" {
                std::future::pending::<()>().await;
            }
            if request.path == "/slow" {
                sleep(SLOW).await;
            }
            let says = request.parameter("says").unwrap_or_default();
            Response::text(200, format!("{} {} {says}", request.method, request.path))
        }
    }

    async fn ask(text: &str) -> String {
        let (mut client, server) = duplex(64 * 1024);
        let server = tokio::spawn(exchange(Box::new(server), None, Arc::default(), Arc::new(Echo)));
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
        assert_eq!(decode("a%20b%26%C3%A9%3D%25"), "a b&\u{e9}=%");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_no_request_or_too_much_is_refused_and_who_says_nothing_is_not_waited_for() {
        for text in ["GET\r\n\r\n", "GET x HTTP/1.1\r\n\r\n", "GET / SPDY/3\r\n\r\n", "\r\n\r\n"] {
            assert!(ask(text).await.starts_with("HTTP/1.1 400 "), "{text:?}");
        }
        assert!(ask(&"x".repeat(LONGEST)).await.starts_with("HTTP/1.1 400 "));
        let begin = Instant::now();
        assert_eq!(ask("GET / HT").await, "");
        assert_eq!(begin.elapsed(), ASKING);
        assert!(ask("GET /never HTTP/1.1\r\n\r\n").await.starts_with("HTTP/1.1 503 "));
        assert_eq!(begin.elapsed(), ASKING + ANSWERING);
    }

    /// Real connections, how long a request takes beside them, and how long all of it takes.
    async fn beside(others: &str, number: usize) -> (Duration, Duration) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = serve(Listener::Tcp(listener), Arc::new(Echo));
        let clients = async {
            let (first, mut held) = (Instant::now(), Vec::new());
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
            (begin.elapsed(), first.elapsed())
        };
        tokio::select! {
            never = server => match never {},
            took = clients => took,
        }
    }

    #[tokio::test]
    async fn who_says_nothing_or_half_a_request_delays_nobody() {
        for others in ["", "GET /healthz HT"] {
            let (took, _) = beside(others, 4 * MOST).await;
            // Four times ASKING if each is waited for.
            assert!(took < ASKING * 2, "{others:?}: {took:?}");
        }
    }

    #[tokio::test]
    async fn no_more_than_so_many_are_answered_at_once_and_none_is_lost() {
        // From the first on: on a slow machine some are over before the last has come.
        let (_, took) = beside("GET /slow HTTP/1.1\r\n\r\n", MOST).await;
        assert!(took >= SLOW, "one of those that are being answered is over first: {took:?}");
    }
}
