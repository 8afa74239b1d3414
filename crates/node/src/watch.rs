//! Watches of one object by name, of objects by label, or of all objects of a kind.

use std::{fmt::Debug, time::Duration};

use futures::{StreamExt as _, stream::BoxStream};
use kube::{
    Api, Resource,
    runtime::{
        utils::Backoff as _,
        watcher::{self, DefaultBackoff, Event, watcher},
    },
};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep_until, timeout_at};

/// The API server ends a watch after this time, and the next one continues at its resource version. This bounds how long
/// a silently lost connection stays unnoticed.
const WATCH_TIMEOUT_SECONDS: u32 = 60;
/// Caps the delay before a failed watch restarts; up to a second is added to spread the nodes.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(5);
/// Bounds the initial list.
const LIST_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a watch failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the API server did not respond within {} s", LIST_TIMEOUT.as_secs())]
    Deadline,
    // The source describes itself and has its own causes.
    #[error(transparent)]
    Broken(#[from] watcher::Error),
}

/// An event of an [`ObjectWatch`].
#[derive(Debug)]
pub enum ObjectEvent<K> {
    /// The complete list: the first event, and the first after a failure.
    Synced(Vec<K>),
    Changed(K),
    Deleted(K),
    /// The watch failed and restarts after a backoff.
    Failed(Error),
}

/// Watches objects. Lists them again after any failure, so that every recovery produces an event.
pub struct ObjectWatch<K: Resource> {
    api: Api<K>,
    config: watcher::Config,
    stream: Option<BoxStream<'static, Result<Event<K>, watcher::Error>>>,
    listed: Vec<K>,
    /// The deadline of a running list.
    deadline: Option<Instant>,
    backoff: DefaultBackoff,
    retry_at: Option<Instant>,
}

impl<K> ObjectWatch<K>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    /// Watches the object of this name, which need not exist.
    pub fn one(api: Api<K>, name: &str) -> Self {
        let mut watch = Self::all(api);
        watch.config = watch.config.fields(&format!("metadata.name={name}"));
        watch
    }

    /// Watches the objects that the label selector selects.
    pub fn labelled(api: Api<K>, selector: &str) -> Self {
        let mut watch = Self::all(api);
        watch.config = watch.config.labels(selector);
        watch
    }

    /// Watches the objects that the field selector selects.
    pub fn selected(api: Api<K>, fields: &str) -> Self {
        let mut watch = Self::all(api);
        watch.config = watch.config.fields(fields);
        watch
    }

    /// Watches every object of the kind.
    pub fn all(api: Api<K>) -> Self {
        Self {
            api,
            config: watcher::Config::default().timeout(WATCH_TIMEOUT_SECONDS),
            stream: None,
            listed: Vec::new(),
            deadline: None,
            backoff: DefaultBackoff::default(),
            retry_at: None,
        }
    }

    /// The next event. Cancel safe.
    pub async fn next(&mut self) -> ObjectEvent<K> {
        loop {
            if let Some(at) = self.retry_at {
                sleep_until(at).await;
                self.retry_at = None;
            }
            let stream =
                self.stream.get_or_insert_with(|| watcher(self.api.clone(), self.config.clone()).boxed());
            let event = match self.deadline {
                Some(at) => match timeout_at(at, stream.next()).await {
                    Ok(event) => event,
                    Err(_) => return self.fail(Error::Deadline),
                },
                None => stream.next().await,
            };
            match event {
                Some(Ok(Event::Init)) => {
                    self.listed.clear();
                    self.deadline = Some(Instant::now() + LIST_TIMEOUT);
                }
                Some(Ok(Event::InitApply(object))) => self.listed.push(object),
                Some(Ok(Event::InitDone)) => {
                    self.deadline = None;
                    self.backoff.reset();
                    return ObjectEvent::Synced(std::mem::take(&mut self.listed));
                }
                Some(Ok(Event::Apply(object))) => return ObjectEvent::Changed(object),
                Some(Ok(Event::Delete(object))) => return ObjectEvent::Deleted(object),
                Some(Err(error)) => return self.fail(error.into()),
                None => self.back_off(),
            }
        }
    }

    fn fail(&mut self, error: Error) -> ObjectEvent<K> {
        self.back_off();
        ObjectEvent::Failed(error)
    }

    fn back_off(&mut self) {
        self.stream = None;
        self.deadline = None;
        self.retry_at = self.backoff.next().map(|delay| Instant::now() + retry_delay(delay));
    }
}

/// Caps the backoff, because pods wait until the watch recovers, and spreads it over the nodes.
fn retry_delay(delay: Duration) -> Duration {
    let spread = Duration::from_millis(delay.subsec_millis().into());
    if delay > MAX_RETRY_DELAY { MAX_RETRY_DELAY + spread } else { delay }
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, future::pending};

    use http::{Request, Response};
    use k8s_openapi::api::core::v1::Node;
    use kube::{Client, client::Body};
    use tokio::sync::mpsc;

    use super::*;

    /// The reaction of the server to one request.
    #[derive(Debug, Clone, Copy)]
    enum ServerReply {
        None,
        List,
        Failure,
    }

    /// A watch, and the replies of its server; without one the server does not respond.
    fn watch() -> (ObjectWatch<Node>, mpsc::UnboundedSender<ServerReply>) {
        let (sender, replies) = mpsc::unbounded_channel();
        let replies = std::sync::Arc::new(tokio::sync::Mutex::new(replies));
        let service = tower::service_fn(move |_: Request<Body>| {
            let replies = std::sync::Arc::clone(&replies);
            async move {
                let reply = replies.lock().await.try_recv().unwrap_or(ServerReply::None);
                let (status, text) = match reply {
                    ServerReply::None => pending().await,
                    ServerReply::List => {
                        (200, r#"{"kind":"NodeList","metadata":{"resourceVersion":"5"},"items":[]}"#)
                    }
                    ServerReply::Failure => {
                        (500, r#"{"kind":"Status","code":500,"message":"no","reason":"no"}"#)
                    }
                };
                let response = Response::builder().status(status).body(Body::from(text.as_bytes().to_vec()));
                Ok::<_, Infallible>(response.unwrap())
            }
        });
        (ObjectWatch::one(Api::all(Client::new(service, "default")), "a"), sender)
    }

    #[tokio::test(start_paused = true)]
    async fn an_unresponsive_server_is_a_failure_after_ten_seconds() {
        let (mut watch, _replies) = watch();
        let start = Instant::now();
        let event = watch.next().await;
        assert!(matches!(event, ObjectEvent::Failed(Error::Deadline)), "{event:?}");
        assert_eq!(start.elapsed().as_secs(), LIST_TIMEOUT.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn a_recovery_resets_the_backoff() {
        let (mut watch, replies) = watch();
        for _ in 0..8 {
            replies.send(ServerReply::Failure).unwrap();
            assert!(matches!(watch.next().await, ObjectEvent::Failed(Error::Broken(_))));
        }
        replies.send(ServerReply::List).unwrap();
        assert!(matches!(watch.next().await, ObjectEvent::Synced(_)));
        replies.send(ServerReply::Failure).unwrap();
        assert!(matches!(watch.next().await, ObjectEvent::Failed(_)));
        let failed = Instant::now();
        replies.send(ServerReply::List).unwrap();
        assert!(matches!(watch.next().await, ObjectEvent::Synced(_)));
        assert!(failed.elapsed() < Duration::from_secs(3), "{:?}", failed.elapsed());
    }
}
