//! A stream between pods beside a flood of hostile datagrams to the port of the backend.

use std::io::IoSlice;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use flannel_lab::Namespace;
use nix::sys::socket::{MsgFlags, MultiHeaders, SockaddrStorage, sendmmsg};

use super::{PORT, Pair, pause};

/// The datagrams of a call.
const BATCH: usize = 64;
/// The host of the flood, which is not a node.
const STRANGER: &str = "192.168.77.200";

/// The stream beside a flood.
pub(super) struct Beside {
    /// Gigabits per second.
    pub(super) stream: f64,
    /// Thousands of datagrams per second.
    pub(super) flood: f64,
}

/// The rate of a stream while the host of its receiver gets hostile datagrams at `port`.
pub(super) fn beside(pair: &Pair, port: u16, time: Duration) -> anyhow::Result<Beside> {
    let (stream, flood) = during(pair, port, || pair.streams(1, time))?;
    Ok(Beside { stream, flood })
}

/// The rate of a flood beside which nothing else happens, in thousands of datagrams per second.
pub(super) fn alone(pair: &Pair, port: u16, time: Duration) -> anyhow::Result<f64> {
    let wait = || {
        pause(time);
        Ok(())
    };
    Ok(during(pair, port, wait)?.1)
}

/// Runs `work` while the host of the second pod gets hostile datagrams at `port`. Returns their
/// rate too, in thousands per second.
fn during<T>(
    pair: &Pair,
    port: u16,
    work: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<(T, f64)> {
    let ([_, victim], at) = pair.ends()?;
    let host = pair.lab.hosts()[1].addresses().v4.context("a host without an address")?;
    let pods = [0, 1].map(|n| pair.lab.hosts()[n].pod().and_then(|pod| pod.addresses().v4));
    let [Some(IpAddr::V4(peer)), Some(IpAddr::V4(pod))] = pods else {
        anyhow::bail!("a pod without an address")
    };
    let stranger = stranger(pair)?;
    let socket = stranger.run(|| UdpSocket::bind("0.0.0.0:0"))??;
    // A hostile packet that passes arrives here.
    let inbox = victim.run(|| UdpSocket::bind(at))??;
    inbox.set_nonblocking(true)?;
    let sent = AtomicU64::new(0);
    let ends = AtomicBool::new(false);
    let result = std::thread::scope(|scope| {
        let flood = scope.spawn(|| flood(&socket, (host, port).into(), [peer, pod], &sent, &ends));
        let begin = Instant::now();
        let before = sent.load(Ordering::Relaxed);
        let done = work();
        let count = sent.load(Ordering::Relaxed) - before;
        let rate = count as f64 / begin.elapsed().as_secs_f64() / 1e3;
        ends.store(true, Ordering::Relaxed);
        flood.join().map_err(|_| anyhow::anyhow!("the flood panicked"))??;
        anyhow::Ok((done?, rate))
    });
    pair.lab.switch().namespace().ip("link delete port-stranger\n")?;
    let result = result?;
    ensure!(inbox.recv(&mut [0; 99]).is_err(), "a hostile packet has reached a pod");
    Ok(result)
}

/// A host on the link of all nodes.
fn stranger(pair: &Pair) -> anyhow::Result<Namespace> {
    let stranger = Namespace::new("stranger")?;
    pair.lab.switch().namespace().ip(&format!(
        "link add port-stranger type veth peer name eth0 netns {}\n\
         link set port-stranger master br0 up\n",
        stranger.path().display()
    ))?;
    stranger.ip(&format!("addr add {STRANGER}/24 dev eth0\nlink set eth0 up\n"))?;
    Ok(stranger)
}

/// Sends as fast as it can.
fn flood(
    socket: &UdpSocket,
    to: SocketAddr,
    pods: [Ipv4Addr; 2],
    sent: &AtomicU64,
    ends: &AtomicBool,
) -> anyhow::Result<()> {
    let datagrams = hostile(pods);
    let slices: Vec<[IoSlice<'_>; 1]> =
        datagrams.iter().map(|datagram| [IoSlice::new(datagram)]).collect();
    let addresses = vec![Some(SockaddrStorage::from(to)); BATCH];
    let mut headers = MultiHeaders::preallocate(BATCH, None);
    while !ends.load(Ordering::Relaxed) {
        let results =
            sendmmsg(socket.as_raw_fd(), &mut headers, &slices, &addresses, [], MsgFlags::empty());
        // A full queue refuses some datagrams.
        let count = results.map_or(0, |results| results.count());
        sent.fetch_add(count as u64, Ordering::Relaxed);
    }
    Ok(())
}

/// Datagrams of each kind: noise, cut packets, fragments, packets from nowhere, and packets that
/// another node would have to send.
fn hostile([peer, pod]: [Ipv4Addr; 2]) -> Vec<Vec<u8>> {
    let mut state = 1_u32;
    let mut random = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..BATCH)
        .map(|n| {
            let mut noise: Vec<u8> = (0..40 + 8 * n).map(|_| random()).collect();
            match n % 5 {
                0 => {}
                1 => noise = packet(peer, pod, &noise)[..noise.len() / 2].to_vec(),
                2 => {
                    noise = packet(peer, pod, &noise);
                    // More fragments follow.
                    noise[6] = 0x20;
                }
                3 => noise = packet([203, 0, 113, noise[0]].into(), pod, &noise),
                _ => noise = packet(peer, pod, &noise),
            }
            noise
        })
        .collect()
}

/// A packet of UDP to the socket of the pod.
fn packet(from: Ipv4Addr, to: Ipv4Addr, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 0, 0, 1, 0, 0, 64, 17, 0, 0];
    packet.extend(from.octets().into_iter().chain(to.octets()));
    // Fewer than 1,000 bytes.
    let len = 8 + payload.len() as u16;
    packet.extend([PORT, PORT, len, 0].map(u16::to_be_bytes).as_flattened());
    packet.extend(payload);
    packet[2..4].copy_from_slice(&(20 + len).to_be_bytes());
    let words = packet[..20].chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
    let sum: u32 = words.sum();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet
}
