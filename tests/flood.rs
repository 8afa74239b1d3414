//! A client without credentials that floods the webhook: its requests have bodies that never end.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use api::names::MUTATE_POD;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use lab::Lab;
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, ServerName, pem::PemObject as _},
};

use crate::patchbay::NAMESPACE;

const CLIENTS: usize = 80;
const WEBHOOK_PORT: u16 = 9443;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Longer than a body may take.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(8);
/// A body that is rejected sooner lost its place to another one: by itself it may take five seconds.
const BODY_TIMEOUT: Duration = Duration::from_secs(4);

/// Clients on a node, each with one request at a time. They end when this is dropped.
pub struct Flood {
    shared: Arc<FloodState>,
    threads: Vec<JoinHandle<()>>,
}

struct FloodState {
    stop: AtomicBool,
    /// The controllers to flood.
    targets: Mutex<Vec<IpAddr>>,
    displaced: AtomicUsize,
    trust: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl Flood {
    /// Floods from the network namespace of a node, where the API server is not.
    pub async fn start(lab: &Lab, node: &str, client: &Client) -> Result<Self> {
        let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
        let data = secrets.get("patchbay-webhook-certs").await?.data.unwrap_or_default();
        let mut roots = RootCertStore::empty();
        for ca in CertificateDer::pem_slice_iter(&data.get("ca.crt").context("no CA")?.0) {
            roots.add(ca?)?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let shared = Arc::new(FloodState {
            stop: AtomicBool::new(false),
            targets: Mutex::default(),
            displaced: AtomicUsize::new(0),
            trust: Arc::new(config.with_root_certificates(roots).with_no_client_auth()),
            name: ServerName::try_from(format!("patchbay-webhook.{NAMESPACE}.svc"))?,
        });
        let spawn = |number| {
            let (machine, shared) = (lab.node(node), Arc::clone(&shared));
            thread::spawn(move || {
                if machine.enter_netns().is_ok() {
                    shared.run(number);
                }
            })
        };
        let threads = (0..CLIENTS).map(spawn).collect();
        Ok(Self { shared, threads })
    }

    pub fn set_targets(&self, controllers: Vec<IpAddr>) {
        *self.shared.targets.lock().unwrap_or_else(PoisonError::into_inner) = controllers;
    }

    /// How many requests lost their place, because a controller had all in use and another request waited.
    pub fn displaced(&self) -> usize {
        self.shared.displaced.load(Ordering::Relaxed)
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl FloodState {
    #[allow(clippy::disallowed_methods, reason = "a pause between connections waits for nothing")]
    fn run(&self, number: usize) {
        while !self.stop.load(Ordering::Relaxed) {
            let targets = self.targets.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let target = targets.get(number % targets.len().max(1));
            let started = Instant::now();
            match target.map(|target| self.send(SocketAddr::new(*target, WEBHOOK_PORT))) {
                Some(Ok(code)) => {
                    let displaced = code == *b"408" && started.elapsed() < BODY_TIMEOUT;
                    self.displaced.fetch_add(usize::from(displaced), Ordering::Relaxed);
                }
                // A controller that is being replaced.
                Some(Err(_)) | None => thread::sleep(Duration::from_millis(100)),
            }
        }
    }

    /// Sends a request without its whole body. Returns the code of the response.
    fn send(&self, target: SocketAddr) -> Result<[u8; 3]> {
        let stream = TcpStream::connect_timeout(&target, CONNECT_TIMEOUT)?;
        stream.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
        let connection = ClientConnection::new(Arc::clone(&self.trust), self.name.clone())?;
        let mut stream = StreamOwned::new(connection, stream);
        let head = format!("POST {MUTATE_POD} HTTP/1.1\r\nHost: webhook\r\nContent-Length: 9999\r\n\r\n{{");
        stream.write_all(head.as_bytes())?;
        stream.flush()?;
        let mut response = [0; 12];
        stream.read_exact(&mut response)?;
        let [.., a, b, c] = response;
        Ok([a, b, c])
    }
}
