//! The watches of the daemon.
//!
//! The watches of IPBlocks list again after each failure: a block serves only while its object is seen, so every recovery
//! confirms all objects. The other watches resume where they broke.

use std::{fmt::Debug, time::Duration};

pub use client::watch::Error;
use client::{
    retry::Backoff,
    watch::{self, AfterFailure, WatchConfig},
};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;

/// Caps the delay before a failed watch restarts, because pods wait until it recovers.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(5);

/// The backoff of every watch of the daemon.
pub fn backoff() -> Backoff {
    Backoff::new(Duration::from_millis(800), MAX_RETRY_DELAY)
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
pub struct ObjectWatch<K>(watch::ObjectWatch<K>);

impl<K> ObjectWatch<K>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    /// Watches the object of this name, which need not exist.
    pub fn one(api: Api<K>, name: &str) -> Self {
        Self::new(api, WatchConfig::one(name))
    }

    /// Watches the objects that the label selector selects.
    pub fn labelled(api: Api<K>, selector: &str) -> Self {
        Self::new(api, WatchConfig::labelled(selector))
    }

    fn new(api: Api<K>, config: WatchConfig) -> Self {
        let config = config.backoff(backoff()).after_failure(AfterFailure::Relist);
        Self(watch::ObjectWatch::new(api, config))
    }

    /// The next event. Cancel safe.
    pub async fn next(&mut self) -> ObjectEvent<K> {
        loop {
            return match self.0.next().await {
                watch::ObjectEvent::Synced(objects) => ObjectEvent::Synced(objects),
                watch::ObjectEvent::Changed(object) => ObjectEvent::Changed(object),
                watch::ObjectEvent::Deleted(object) => ObjectEvent::Deleted(object),
                watch::ObjectEvent::Failed(error) => ObjectEvent::Failed(error),
                // A watch that lists again never resumes.
                watch::ObjectEvent::Resumed => continue,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, future::pending, sync::Mutex};

    use http::{Request, Response};
    use k8s_openapi::api::core::v1::Node;
    use kube::{Client, client::Body};
    use plan::ipam::limits::{OFFLINE_GRACE, OFFLINE_LIMIT, UNNOTICED_BREAK};
    use tokio::{sync::mpsc, time::Instant};

    use super::*;

    /// The reaction of the server to one request.
    #[derive(Debug, Clone, Copy)]
    enum ServerReply {
        List,
        /// The server accepts the watch and ends it.
        EndedWatch,
    }

    /// A watch, and the replies of its server; without one the server does not respond.
    fn watch() -> (ObjectWatch<Node>, mpsc::UnboundedSender<ServerReply>) {
        let (sender, replies) = mpsc::unbounded_channel();
        let replies = std::sync::Arc::new(Mutex::new(replies));
        let service = tower::service_fn(move |_: Request<Body>| {
            let reply = replies.lock().unwrap().try_recv();
            async move {
                let (status, text) = match reply {
                    Err(_) => pending().await,
                    Ok(ServerReply::List) => {
                        (200, r#"{"kind":"NodeList","metadata":{"resourceVersion":"5"},"items":[]}"#)
                    }
                    Ok(ServerReply::EndedWatch) => (200, ""),
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
        assert!(matches!(event, ObjectEvent::Failed(Error::Deadline(_))), "{event:?}");
        assert_eq!(start.elapsed().as_secs(), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn every_recovery_lists_the_objects_again() {
        let (mut watch, replies) = watch();
        replies.send(ServerReply::List).unwrap();
        assert!(matches!(watch.next().await, ObjectEvent::Synced(_)));
        // The watch breaks, and the server does not respond to the next one.
        replies.send(ServerReply::EndedWatch).unwrap();
        let event = watch.next().await;
        assert!(matches!(event, ObjectEvent::Failed(Error::Deadline(_))), "{event:?}");
        replies.send(ServerReply::List).unwrap();
        let event = watch.next().await;
        assert!(matches!(event, ObjectEvent::Synced(_)), "{event:?}");
    }

    /// A daemon that lost its contact must not allocate after [`OFFLINE_LIMIT`]: it takes up to the detection time of the
    /// watch until it notices, and it allocates for [`OFFLINE_GRACE`] after that.
    #[test]
    fn a_lost_watch_is_noticed_early_enough_for_the_offline_limit() {
        let noticed = watch::DETECTION_TIME;
        assert!(watch::WATCH_TIMEOUT < noticed);
        assert!(noticed <= UNNOTICED_BREAK, "{noticed:?}");
        assert!(noticed + OFFLINE_GRACE <= OFFLINE_LIMIT, "{noticed:?} + {OFFLINE_GRACE:?}");
    }
}
