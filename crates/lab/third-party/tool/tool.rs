//! The tool inside test pods: waits, echoes, asks. Standard library only, linked statically.
//!
//! ```text
//! tool pause                          wait until told to stop
//! tool echo PORT                      answer every TCP line and UDP datagram on PORT with "<hostname> <peer> <text>"
//! tool ask tcp|udp HOST:PORT TEXT     send TEXT, print the answer; exit 1 without one
//! ```

use std::{
    env, fs,
    io::{BufRead, BufReader, Read, Write},
    net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket},
    process::exit,
    thread,
    time::Duration,
};

const PATIENCE: Duration = Duration::from_secs(2);

unsafe extern "C" {
    fn signal(number: i32, handler: extern "C" fn(i32)) -> usize;
    fn _exit(code: i32) -> !;
}

extern "C" fn leave(_: i32) {
    // SAFETY: `_exit` may be called from a signal handler and does not return.
    unsafe { _exit(0) }
}

fn main() {
    // The kernel drops SIGTERM for a first process without a handler; pods would then take their whole grace period to end.
    for number in [2, 15] {
        // SAFETY: the handler only calls `_exit`.
        unsafe { signal(number, leave) };
    }
    let args: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match words[..] {
        ["pause"] | [] => pause(),
        ["echo", port] => port.parse().map_err(|e| format!("port {port}: {e}")).and_then(echo),
        ["ask", "tcp", to, text] => ask_tcp(to, text),
        ["ask", "udp", to, text] => ask_udp(to, text),
        _ => Err("usage: tool pause | echo PORT | ask tcp|udp HOST:PORT TEXT".to_owned()),
    };
    if let Err(reason) = outcome {
        eprintln!("tool: {reason}");
        exit(1);
    }
}

/// Reading from a pipe that nobody writes to costs nothing.
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
        thread::spawn(move || answer(stream, &host));
    }
    Ok(())
}

fn answer(stream: TcpStream, host: &str) {
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

fn ask_tcp(to: &str, text: &str) -> Result<(), String> {
    let stream = TcpStream::connect_timeout(&address(to)?, PATIENCE).map_err(|e| format!("connect to {to}: {e}"))?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(|e| e.to_string())?;
    (&stream).write_all(format!("{text}\n").as_bytes()).map_err(|e| format!("send to {to}: {e}"))?;
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).map_err(|e| format!("read from {to}: {e}"))?;
    print!("{line}");
    if line.is_empty() { Err(format!("{to} closed without an answer")) } else { Ok(()) }
}

fn ask_udp(to: &str, text: &str) -> Result<(), String> {
    let address = address(to)?;
    let any: SocketAddr = if address.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" }.parse().map_err(|e| format!("{e}"))?;
    let socket = UdpSocket::bind(any).map_err(|e| e.to_string())?;
    socket.set_read_timeout(Some(PATIENCE)).map_err(|e| e.to_string())?;
    socket.send_to(text.as_bytes(), address).map_err(|e| format!("send to {to}: {e}"))?;
    let mut buffer = [0; 65_535];
    let (length, _) = socket.recv_from(&mut buffer).map_err(|e| format!("no answer from {to}: {e}"))?;
    println!("{}", String::from_utf8_lossy(&buffer[..length]));
    Ok(())
}
