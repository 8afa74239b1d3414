//! The one door of a lab: a listener on 127.0.0.1 of this machine that dials the API server inside.

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

use crate::cgroup::Group;

/// `lab forward GROUP NETNS TARGET PORTFILE PORT`: listens here, then moves into the lab's network and dials from there.
///
/// The port of an earlier run is taken again where it is free, so that kubeconfigs stay valid.
pub fn run(group: &str, network: &Path, target: SocketAddr, port_file: &Path, port: u16) -> Result<()> {
    Group::at(group).enter()?;
    setsid().context("leave the terminal")?;
    let listener = TcpListener::bind(("127.0.0.1", port))
        .or_else(|_| TcpListener::bind(("127.0.0.1", 0)))
        .context("listen on 127.0.0.1")?;
    let network = fs::File::open(network).with_context(|| format!("open {}", network.display()))?;
    setns(network, CloneFlags::CLONE_NEWNET).context("enter the lab's network")?;
    let port = listener.local_addr().context("read the port")?.port();
    crate::pki::write_secret(port_file, &port.to_string())?;
    listener.set_nonblocking(true).context("prepare the listener")?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the runtime")?;
    runtime.block_on(serve(listener, target))
}

async fn serve(listener: TcpListener, target: SocketAddr) -> Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener).context("take the listener over")?;
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((mut client, _)) = accepted else { continue };
                connections.spawn(async move {
                    // An API server that is down shows as a closed connection, as anywhere.
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
