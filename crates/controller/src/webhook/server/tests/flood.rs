//! A pod without credentials floods the webhook, over real connections. Sources are addresses of the loopback interface.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::TcpStream,
    time::{Instant, SystemTime},
};

use k8s_openapi::ByteString;
use plan::certs::Validity;
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, ServerName, pem::PemObject as _},
};
use tokio::{net::TcpSocket, task::JoinSet};

use super::*;
use crate::webhook::certs::x509;

const NAME: &str = "hook.ns.svc";
const API_SERVER: u8 = 3;
const POD: u8 = 2;
/// By how much the pod may delay an admission.
const MAX_DELAY: Duration = Duration::from_millis(100);

type TlsStream = StreamOwned<ClientConnection, TcpStream>;

/// A webhook that serves on a loopback address.
struct ServedWebhook {
    state: Arc<WebhookState>,
    addr: SocketAddr,
    trust: Arc<ClientConfig>,
    _server: JoinSet<io::Result<()>>,
}

impl ServedWebhook {
    fn start() -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let validity = Validity::starting_at(SystemTime::now(), Duration::from_hours(1));
        let ca = x509::create_ca(validity).unwrap();
        let id = x509::parse_bundle(ca.certificate.as_bytes()).cas.remove(0).id;
        let leaf = x509::sign_leaf(&id, ca.key.as_bytes(), NAME.to_owned(), validity).unwrap();
        let parts = [(x509::TLS_CRT, leaf.certificate), (x509::TLS_KEY, leaf.key)];
        let data: BTreeMap<String, ByteString> =
            parts.map(|(key, text)| (key.to_owned(), ByteString(text.into_bytes()))).into();
        let tls = RustlsConfig::from_config(x509::server_config(&data).unwrap());
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(ca.certificate.as_bytes()).unwrap()).unwrap();
        let trust = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();

        let listener = listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let addr = listener.local_addr().unwrap();
        let state = state();
        let mut server = JoinSet::new();
        server.spawn(serve_tls(listener, router(state.clone()), Handle::new(), async { Some(tls) }));
        Self { state, addr, trust: Arc::new(trust), _server: server }
    }

    /// A connection that sends nothing.
    async fn connect(&self, source: u8) -> io::Result<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        socket.bind((IpAddr::from([127, 0, 0, source]), 0).into())?;
        let stream = socket.connect(self.addr).await?.into_std()?;
        stream.set_nonblocking(false)?;
        Ok(stream)
    }

    /// Sends a request whose body has this length, and only this part of the body.
    async fn send(&self, source: u8, length: usize, part: String) -> io::Result<TlsStream> {
        self.post(source, VALIDATE_NODENETWORKS, length, part).await
    }

    async fn post(&self, source: u8, path: &str, length: usize, part: String) -> io::Result<TlsStream> {
        let stream = self.connect(source).await?;
        let trust = self.trust.clone();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: {NAME}\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\nConnection: close\r\n\r\n"
        );
        let send = move || {
            let connection = ClientConnection::new(trust, ServerName::try_from(NAME).unwrap())
                .map_err(io::Error::other)?;
            let mut stream = TlsStream::new(connection, stream);
            stream.write_all((head + &part).as_bytes())?;
            stream.flush()?;
            Ok(stream)
        };
        tokio::task::spawn_blocking(send).await.unwrap()
    }

    /// Asks for an admission as the API server does. Returns how long it took.
    async fn admit(&self) -> Duration {
        let start = Instant::now();
        let body = review("CREATE", "worker-1").to_string();
        let response = answer(self.send(API_SERVER, body.len(), body).await.unwrap()).await;
        assert!(
            response.starts_with("HTTP/1.1 200 ") && response.contains(r#""allowed":true"#),
            "{response}"
        );
        start.elapsed()
    }

    /// The shortest of some admissions: what the machine does meanwhile does not count.
    async fn fastest(&self) -> Duration {
        let mut fastest = Duration::MAX;
        for _ in 0..3 {
            fastest = fastest.min(self.admit().await);
        }
        fastest
    }

    /// 80 requests whose bodies never end, and 512 connections that send nothing.
    async fn flood(&self) -> (Vec<TlsStream>, Vec<TcpStream>) {
        let slow = futures::future::join_all((0..80).map(|_| self.send(POD, 1000, "{".to_owned()))).await;
        let idle = futures::future::join_all((0..512).map(|_| self.connect(POD))).await;
        while self.state.bodies.held() < admission::MAX_CONCURRENT_BODIES {
            tokio::task::yield_now().await;
        }
        (slow.into_iter().flatten().collect(), idle.into_iter().flatten().collect())
    }
}

async fn answer(mut stream: TlsStream) -> String {
    let read = move || {
        let mut response = String::new();
        // The listener may close the connection without a close_notify alert.
        let _ = stream.read_to_string(&mut response);
        response
    };
    tokio::task::spawn_blocking(read).await.unwrap()
}

/// The API server holds two connections, and each of the pods one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_answered_while_more_clients_connect_than_there_are_connections() {
    let webhook = ServedWebhook::start();
    let instance = json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "vm1", "uid": "i", "controller": true}]);
    let launcher = json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "u-1",
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "operation": "CREATE",
            "namespace": "ns",
            "userInfo": {},
            "object": {"metadata": {
                "labels": {"kubevirt.io": "virt-launcher"},
                "annotations": {"k8s.v1.cni.cncf.io/networks": "blue", "kubevirt.io/domain": "vm1"},
                "ownerReferences": instance,
            }},
        },
    });
    let body = launcher.to_string();
    let waits = webhook.post(API_SERVER, MUTATE_POD, body.len(), body).await.unwrap();
    while webhook.state.live_reads.held() == 0 {
        tokio::task::yield_now().await;
    }
    let _idle = webhook.connect(API_SERVER).await.unwrap();
    let pods = futures::future::join_all((10..140).map(|pod| webhook.connect(pod))).await;
    assert!(pods.iter().all(Result::is_ok));
    webhook.admit().await;
    let response = answer(waits).await;
    assert!(response.contains("cannot read VirtualMachineInstance ns/vm1"), "{response}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_and_slow_bodies_of_a_pod_do_not_delay_the_api_server() {
    let webhook = ServedWebhook::start();
    let alone = webhook.fastest().await;
    let (slow, idle) = webhook.flood().await;
    assert_eq!((slow.len(), idle.len()), (80, 512));
    let flooded = webhook.fastest().await;
    assert!(flooded < alone + MAX_DELAY, "{flooded:?}, without the pod {alone:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_of_the_api_server_is_admitted_whole_beside_a_pod_that_floods() {
    let webhook = ServedWebhook::start();
    let _flood = webhook.flood().await;
    futures::future::join_all((0..48).map(|_| webhook.admit())).await;
    let text = webhook.state.metrics.text().unwrap();
    let admitted = "patchbay_admission_requests_total{path=\"ValidateNodeNetworks\",result=\"Allowed\"} 48";
    assert!(text.lines().any(|line| line == admitted), "{text}");
}
