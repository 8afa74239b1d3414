//! An API server for tests that responds as it is told.

use std::{
    convert::Infallible,
    future::pending,
    sync::{Arc, Mutex},
};

use axum::body::Body;
use http::{Method, Request, Response};
use kube::Client;
use tokio::sync::mpsc;

/// The response to one request.
#[derive(Debug)]
pub enum Reply {
    /// The server accepts the request and never responds.
    Silence,
    /// A complete body.
    Body(u16, String),
    /// A watch that sends what the receiver yields, and ends when its sender is dropped.
    Watch(mpsc::UnboundedReceiver<String>),
}

impl Reply {
    pub fn status(code: u16, reason: &str) -> Self {
        Self::Body(code, format!(r#"{{"kind":"Status","code":{code},"reason":"{reason}","message":"no"}}"#))
    }

    /// A page of a list. Each item is the JSON text of an object.
    pub fn page(version: &str, token: &str, items: &[String]) -> Self {
        let metadata = format!(r#"{{"resourceVersion":"{version}","continue":"{token}"}}"#);
        let items = items.join(",");
        let list = format!(r#"{{"apiVersion":"v1","kind":"List","metadata":{metadata},"items":[{items}]}}"#);
        Self::Body(200, list)
    }

    /// A watch, and the sender of its events.
    pub fn watch() -> (Self, mpsc::UnboundedSender<String>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (Self::Watch(receiver), sender)
    }
}

/// A server that sends the scripted replies in order, and then [`Reply::Silence`].
pub struct ScriptedServer {
    replies: mpsc::UnboundedSender<Reply>,
    requests: Arc<Mutex<Vec<(Method, String, String)>>>,
}

impl ScriptedServer {
    pub fn new() -> (Client, Self) {
        let (sender, replies) = mpsc::unbounded_channel();
        let (replies, requests) = (Arc::new(Mutex::new(replies)), Arc::<Mutex<Vec<_>>>::default());
        let recorded = Arc::clone(&requests);
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let (replies, recorded) = (Arc::clone(&replies), Arc::clone(&recorded));
            async move {
                let (parts, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap();
                let body = String::from_utf8(body.to_vec()).unwrap();
                recorded.lock().unwrap().push((parts.method, parts.uri.to_string(), body));
                let reply = replies.lock().unwrap().try_recv().unwrap_or(Reply::Silence);
                let (status, body) = match reply {
                    Reply::Silence => pending().await,
                    Reply::Body(status, body) => (status, Body::from(body)),
                    Reply::Watch(events) => (200, watch_body(events)),
                };
                Ok::<_, Infallible>(Response::builder().status(status).body(body).unwrap())
            }
        });
        (Client::new(service, "default"), Self { replies: sender, requests })
    }

    pub fn reply(&self, reply: Reply) {
        self.replies.send(reply).unwrap();
    }

    /// The method, the URI and the body of each request so far.
    pub fn requests(&self) -> Vec<(Method, String, String)> {
        self.requests.lock().unwrap().clone()
    }
}

fn watch_body(events: mpsc::UnboundedReceiver<String>) -> Body {
    Body::from_stream(futures::stream::unfold(events, async |mut events| {
        let line = events.recv().await? + "\n";
        Some((Ok::<_, Infallible>(line), events))
    }))
}
