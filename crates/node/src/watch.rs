//! A watch of one object by name, or of all of a kind.

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

/// After how many seconds the API server ends a watch, and a new one begins where it ended. A watch that is silent for
/// longer has lost its server without a word, so this is how long such a loss can go unnoticed.
const WATCH_TIMEOUT_SECONDS: u32 = 60;
/// How long a watch that broke waits at most until it is made anew, but for a second.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(5);
/// How long the API server may take to show what there is.
const LIST_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a watch broke.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the API server gave no answer within {} s", LIST_TIMEOUT.as_secs())]
    Deadline,
    // It says all there is to say by itself, and its causes after that.
    #[error(transparent)]
    Broken(#[from] watcher::Error),
}

/// What a watch saw.
#[derive(Debug)]
pub enum ObjectEvent<K> {
    /// All objects as they are now: the first word, and the first after a failure.
    Synced(Vec<K>),
    Changed(K),
    Deleted(K),
    /// The watch is fail and will be made anew after a back_off.
    Failed(Error),
}

/// Watches objects. After any failure it reads them all again, so that the end of a failure is always event.
pub struct ObjectWatch<K: Resource> {
    api: Api<K>,
    config: watcher::Config,
    stream: Option<BoxStream<'static, Result<Event<K>, watcher::Error>>>,
    listed: Vec<K>,
    /// When the objects have to be there, while they are read.
    deadline: Option<Instant>,
    backoff: DefaultBackoff,
    retry_at: Option<Instant>,
}

impl<K> ObjectWatch<K>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    /// Watches the one object of this name, which need not exist.
    pub fn one(api: Api<K>, name: &str) -> Self {
        let mut watch = Self::all(api);
        watch.config = watch.config.fields(&format!("metadata.name={name}"));
        watch
    }

    /// Watches the objects whose labels this selects.
    pub fn labelled(api: Api<K>, selector: &str) -> Self {
        let mut watch = Self::all(api);
        watch.config = watch.config.labels(selector);
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

    /// The next thing that is event. May be dropped at any time: nothing is lost.
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

/// Pods wait for an API server that is back: no longer than this, and not all nodes as long as each other.
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

    /// What a server does with one request.
    #[derive(Debug, Clone, Copy)]
    enum ServerReply {
        Silence,
        List,
        Refusal,
    }

    /// A watch, and the server's next answers; a server without any says nothing.
    fn watch() -> (ObjectWatch<Node>, mpsc::UnboundedSender<ServerReply>) {
        let (sender, answers) = mpsc::unbounded_channel();
        let answers = std::sync::Arc::new(tokio::sync::Mutex::new(answers));
        let service = tower::service_fn(move |_: Request<Body>| {
            let answers = std::sync::Arc::clone(&answers);
            async move {
                let answer = answers.lock().await.try_recv().unwrap_or(ServerReply::Silence);
                let (status, text) = match answer {
                    ServerReply::Silence => pending().await,
                    ServerReply::List => {
                        (200, r#"{"kind":"NodeList","metadata":{"resourceVersion":"5"},"items":[]}"#)
                    }
                    ServerReply::Refusal => {
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
    async fn a_server_that_says_nothing_is_a_failure_after_ten_seconds() {
        let (mut watch, _answers) = watch();
        let start = Instant::now();
        let event = watch.next().await;
        assert!(matches!(event, ObjectEvent::Failed(Error::Deadline)), "{event:?}");
        assert_eq!(start.elapsed().as_secs(), LIST_TIMEOUT.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_recovery_the_next_failure_is_tried_again_soon() {
        let (mut watch, answers) = watch();
        for _ in 0..8 {
            answers.send(ServerReply::Refusal).unwrap();
            assert!(matches!(watch.next().await, ObjectEvent::Failed(Error::Broken(_))));
        }
        answers.send(ServerReply::List).unwrap();
        assert!(matches!(watch.next().await, ObjectEvent::Synced(_)));
        answers.send(ServerReply::Refusal).unwrap();
        assert!(matches!(watch.next().await, ObjectEvent::Failed(_)));
        let failed = Instant::now();
        answers.send(ServerReply::List).unwrap();
        assert!(matches!(watch.next().await, ObjectEvent::Synced(_)));
        assert!(failed.elapsed() < Duration::from_secs(3), "{:?}", failed.elapsed());
    }
}
