//! The program inside test pods: pause, echo server, client. Standard library only, linked statically.
//!
//! ```text
//! tool pause                          wait for SIGTERM or SIGINT
//! tool echo PORT                      reply to every TCP line and UDP datagram on PORT with "<hostname> <peer> <text>"
//! tool send tcp|udp HOST:PORT TEXT    send TEXT and print the reply; exit with 1 if there is none
//! ```

use std::{
    env, fs,
    io::{BufRead, BufReader, Read, Write},
    net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket},
    process::exit,
    thread,
    time::Duration,
};

const REPLY_TIMEOUT: Duration = Duration::from_secs(2);

unsafe extern "C" {
    fn signal(number: i32, handler: extern "C" fn(i32)) -> usize;
    fn _exit(code: i32) -> !;
}

extern "C" fn exit_on_signal(_: i32) {
    // SAFETY: `_exit` may be called from a signal handler and does not return.
    unsafe { _exit(0) }
}

fn main() {
    // The kernel ignores SIGTERM for pid 1 without a handler; pods would then need their whole grace period to stop.
    for number in [2, 15] {
        // SAFETY: the handler only calls `_exit`.
        unsafe { signal(number, exit_on_signal) };
    }
    let args: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match words[..] {
        ["pause"] | [] => pause(),
        ["echo", port] => port.parse().map_err(|e| format!("port {port}: {e}")).and_then(echo),
        ["send", "tcp", to, text] => send_tcp(to, text),
        ["send", "udp", to, text] => send_udp(to, text),
        _ => Err("usage: tool pause | echo PORT | send tcp|udp HOST:PORT TEXT".to_owned()),
    };
    if let Err(reason) = outcome {
        eprintln!("tool: {reason}");
        exit(1);
    }
}

/// Blocks on a pipe that is never written to, which uses no CPU time.
fn pause() -> Result<(), String> {
    let (mut reader, _writer) = std::io::pipe().map_err(|e| e.to_string())?;
    let mut byte = [0];
    reader.read(&mut byte).map(|_| ()).map_err(|e| e.to_string())
}

fn hostname() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

fn echo(port: u16) -> Result<(), String> {
    let any = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
    let tcp = TcpListener::bind(any).map_err(|e| format!("listen on tcp {port}: {e}"))?;
    let udp = UdpSocket::bind(any).map_err(|e| format!("listen on udp {port}: {e}"))?;
    let host = hostname();
    let name = host.clone();
    thread::spawn(move || {
        let mut buffer = [0; 65_535];
        while let Ok((length, peer)) = udp.recv_from(&mut buffer) {
            let text = String::from_utf8_lossy(&buffer[..length]);
            let _ = udp.send_to(format!("{name} {} {text}", peer.ip()).as_bytes(), peer);
        }
    });
    for stream in tcp.incoming().flatten() {
        let host = host.clone();
        thread::spawn(move || reply(stream, &host));
    }
    Ok(())
}

fn reply(stream: TcpStream, host: &str) {
    let Ok(peer) = stream.peer_addr() else { return };
    let Ok(mut writer) = stream.try_clone() else { return };
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        if writer.write_all(format!("{host} {} {line}\n", peer.ip()).as_bytes()).is_err() {
            return;
        }
    }
}

fn address(to: &str) -> Result<SocketAddr, String> {
    to.to_socket_addrs().map_err(|e| format!("{to}: {e}"))?.next().ok_or_else(|| format!("{to}: no address"))
}

fn send_tcp(to: &str, text: &str) -> Result<(), String> {
    let stream = TcpStream::connect_timeout(&address(to)?, REPLY_TIMEOUT).map_err(|e| format!("connect to {to}: {e}"))?;
    stream.set_read_timeout(Some(REPLY_TIMEOUT)).map_err(|e| e.to_string())?;
    (&stream).write_all(format!("{text}\n").as_bytes()).map_err(|e| format!("send to {to}: {e}"))?;
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).map_err(|e| format!("read from {to}: {e}"))?;
    print!("{line}");
    if line.is_empty() { Err(format!("{to} closed the connection without a reply")) } else { Ok(()) }
}

fn send_udp(to: &str, text: &str) -> Result<(), String> {
    let address = address(to)?;
    let any: SocketAddr = if address.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" }.parse().map_err(|e| format!("{e}"))?;
    let socket = UdpSocket::bind(any).map_err(|e| e.to_string())?;
    socket.set_read_timeout(Some(REPLY_TIMEOUT)).map_err(|e| e.to_string())?;
    socket.send_to(text.as_bytes(), address).map_err(|e| format!("send to {to}: {e}"))?;
    let mut buffer = [0; 65_535];
    let (length, _) = socket.recv_from(&mut buffer).map_err(|e| format!("no reply from {to}: {e}"))?;
    println!("{}", String::from_utf8_lossy(&buffer[..length]));
    Ok(())
}
