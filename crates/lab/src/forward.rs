//! The forwarder: listens on 127.0.0.1 of the host and proxies each connection to the API server inside the lab.

use std::{
    fs,
    net::{SocketAddr, TcpListener},
    path::Path,
};

use anyhow::{Context as _, Result};
use nix::{
    sched::{CloneFlags, setns},
    unistd::setsid,
};
use tokio::{io::copy_bidirectional, net::TcpStream, task::JoinSet};

use crate::cgroup::Cgroup;

/// `lab forward CGROUP NETNS TARGET PORTFILE PORT`: binds the listener in the host's network namespace, then enters
/// the lab's namespace and dials from there.
///
/// Binds PORT, the port of an earlier run, if it is free, so that kubeconfigs stay valid.
pub fn run(cgroup: &str, netns: &Path, target: SocketAddr, port_file: &Path, port: u16) -> Result<()> {
    Cgroup::at(cgroup).enter()?;
    setsid().context("create a session")?;
    let listener = TcpListener::bind(("127.0.0.1", port))
        .or_else(|_| TcpListener::bind(("127.0.0.1", 0)))
        .context("listen on 127.0.0.1")?;
    let netns = fs::File::open(netns).with_context(|| format!("open {}", netns.display()))?;
    setns(netns, CloneFlags::CLONE_NEWNET).context("enter the lab's network namespace")?;
    let port = listener.local_addr().context("read the port")?.port();
    crate::pki::write_secret(port_file, &port.to_string())?;
    listener.set_nonblocking(true).context("make the listener non-blocking")?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the runtime")?;
    runtime.block_on(serve(listener, target))
}

async fn serve(listener: TcpListener, target: SocketAddr) -> Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener).context("register the listener with tokio")?;
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((mut client, _)) = accepted else { continue };
                connections.spawn(async move {
                    // The client sees a closed connection while the API server is down.
                    let Ok(mut server) = TcpStream::connect(target).await else { return };
                    let _ = client.set_nodelay(true);
                    let _ = server.set_nodelay(true);
                    let _ = copy_bidirectional(&mut client, &mut server).await;
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}
