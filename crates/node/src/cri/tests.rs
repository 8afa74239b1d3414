//! Runtimes that answer, refuse, hang, or are none.

use std::fs;

use api::ErrorChain;
use axum::{
    Router,
    body::{Body, Bytes},
    http::{HeaderMap, HeaderValue, Response},
    routing::post,
};
use http_body_util::{BodyExt as _, Full};
use prost::Message as _;
use tokio::{net::UnixListener, task::JoinSet};
use wire::cri::PodSandboxMetadata;

use super::*;

/// A directory of one test.
struct TempDir(PathBuf);

impl TempDir {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("patchbay-cri-{}-{test}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn socket(&self) -> PathBuf {
        self.0.join("runtime.sock")
    }

    fn listen(&self) -> UnixListener {
        UnixListener::bind(self.socket()).unwrap()
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}

/// An answer as a runtime gives it: a message behind its length, then how it went.
fn answer(message: Vec<u8>, status: &'static str) -> Response<Body> {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    let bytes = [&[0][..], &length, &message].concat();
    let trailers = HeaderMap::from_iter([(
        http::HeaderName::from_static("grpc-status"),
        HeaderValue::from_static(status),
    )]);
    let body = Full::new(Bytes::from(bytes)).with_trailers(async { Some(Ok(trailers)) });
    Response::builder().header("content-type", "application/grpc").body(Body::new(body)).unwrap()
}

/// A runtime that gives this answer, for as long as the set lives.
fn runtime(dir: &TempDir, message: Vec<u8>, status: &'static str) -> (ContainerRuntime, JoinSet<()>) {
    let router = Router::new().route(
        cri::LIST_POD_SANDBOX,
        post(move |question: Bytes| async move {
            assert_eq!(question[..], [0; 5]);
            answer(message, status)
        }),
    );
    (ContainerRuntime::new(vec![dir.socket()]), serve(dir, router))
}

fn serve(dir: &TempDir, router: Router) -> JoinSet<()> {
    let (listener, mut tasks) = (dir.listen(), JoinSet::new());
    tasks.spawn(async move { axum::serve(listener, router).await.unwrap() });
    tasks
}

fn sandbox(number: usize, state: i32) -> PodSandbox {
    let metadata = PodSandboxMetadata {
        name: format!("web-{number}"),
        uid: format!("uid-{number}"),
        namespace: "shop".to_owned(),
        attempt: 1,
    };
    PodSandbox { id: format!("id-{number}"), metadata: Some(metadata), state, created_at: 1 }
}

#[tokio::test]
async fn sandboxes_are_told_with_their_pod_and_whether_they_live() {
    let dir = TempDir::new("told");
    let nameless = PodSandbox { id: "bare".to_owned(), ..PodSandbox::default() };
    let items = vec![sandbox(1, 0), sandbox(2, 1), sandbox(3, 9), nameless];
    let message = ListPodSandboxResponse { items }.encode_to_vec();
    let (runtime, _tasks) = runtime(&dir, message, "0");
    let found = runtime.sandboxes().await.unwrap();
    let told: Vec<_> = found.iter().map(|one| (one.id.as_str(), one.uid.as_str(), one.ready)).collect();
    assert_eq!(
        told,
        [("id-1", "uid-1", true), ("id-2", "uid-2", false), ("id-3", "uid-3", true), ("bare", "", true)]
    );
    assert_eq!((found[0].namespace.as_str(), found[0].name.as_str()), ("shop", "web-1"));
    // And again, over another connection.
    assert_eq!(runtime.sandboxes().await.unwrap(), found);
}

#[tokio::test]
async fn thousands_of_sandboxes_with_long_annotations_are_read() {
    let dir = TempDir::new("many");
    let mut message = Vec::new();
    for number in 0..5000 {
        let mut one = sandbox(number, 0).encode_to_vec();
        // Field 7, one annotation.
        let annotation = [b"\x0a\x01a\x12".to_vec(), length(4000), vec![b'x'; 4000]].concat();
        one.extend([b"\x3a".to_vec(), length(annotation.len()), annotation].concat());
        message.extend([b"\x0a".to_vec(), length(one.len()), one].concat());
    }
    assert!(message.len() > 16 * 1024 * 1024);
    let (runtime, _tasks) = runtime(&dir, message, "0");
    let found = runtime.sandboxes().await.unwrap();
    assert_eq!((found.len(), found[4999].uid.as_str()), (5000, "uid-4999"));
}

fn length(length: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    prost::encoding::encode_varint(length as u64, &mut bytes);
    bytes
}

#[tokio::test]
async fn an_answer_that_is_cut_off_or_no_message_is_an_error() {
    for (test, message, status) in [
        ("garbage", vec![0xff; 40], "0"),
        ("failed", Vec::new(), "13"),
        ("broken", vec![0x0a, 0x7f, 0x0a], "0"),
    ] {
        let dir = TempDir::new(test);
        let (runtime, _tasks) = runtime(&dir, message, status);
        let error = runtime.sandboxes().await.unwrap_err();
        assert!(matches!(error, Error::List { .. }), "{test}: {error:?}");
    }
}

#[tokio::test]
async fn a_server_that_is_no_runtime_is_named() {
    let dir = TempDir::new("other");
    let _tasks = serve(&dir, Router::new());
    let error = ContainerRuntime::new(vec![dir.socket()]).sandboxes().await.unwrap_err();
    assert!(matches!(error, Error::NoCri { .. }), "{error:?}");
    assert!(error.to_string().contains("runtime.sock does not speak CRI v1"), "{error}");
}

#[tokio::test]
async fn without_a_socket_the_places_that_were_tried_are_named() {
    let dir = TempDir::new("missing");
    let error = ContainerRuntime::discover(&dir.0).sandboxes().await.unwrap_err();
    let told = error.to_string();
    for socket in DEFAULT_SOCKETS {
        assert!(told.contains(&dir.0.join(socket).display().to_string()), "{told}");
    }
}

#[tokio::test]
async fn the_first_socket_that_is_there_counts_even_if_nobody_listens() {
    let dir = TempDir::new("first");
    let message = ListPodSandboxResponse { items: vec![sandbox(1, 0)] }.encode_to_vec();
    let (_, _tasks) = runtime(&dir, message, "0");
    let (gone, left) = (dir.0.join("gone.sock"), dir.0.join("left.sock"));
    let with = |first: &PathBuf| ContainerRuntime::new(vec![first.clone(), dir.socket()]);
    assert_eq!(with(&gone).sandboxes().await.unwrap().len(), 1);
    drop(UnixListener::bind(&left).unwrap());
    let error = with(&left).sandboxes().await.unwrap_err();
    assert!(matches!(error, Error::Connect { .. }), "{error:?}");
    assert!(ErrorChain(&error).to_string().contains("refused"), "{}", ErrorChain(&error));
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_hangs_is_given_up_at_the_deadline() {
    let dir = TempDir::new("hangs");
    let _listener = dir.listen();
    let since = tokio::time::Instant::now();
    let error = ContainerRuntime::new(vec![dir.socket()]).sandboxes().await.unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error:?}");
    assert_eq!(since.elapsed().as_secs(), CRI_TIMEOUT.as_secs());
}
