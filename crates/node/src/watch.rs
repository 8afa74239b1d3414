//! A watch of one object by name.

use std::fmt::Debug;

use futures::{StreamExt as _, stream::BoxStream};
use kube::{
    Api, Resource,
    runtime::watcher::{self, DefaultBackoff, Event, watcher},
};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep_until};

/// What a watch saw.
#[derive(Debug)]
pub enum Seen<K> {
    /// The object as it is now, or that there is none: the first word, and the first after a failure.
    Synced(Option<K>),
    Changed(K),
    Gone(K),
    /// The watch is broken and will be made anew after a pause.
    Failed(watcher::Error),
}

/// Watches one object. After any failure it reads the object again, so that the end of a failure is always seen.
pub struct Watch<K: Resource> {
    api: Api<K>,
    config: watcher::Config,
    stream: Option<BoxStream<'static, Result<Event<K>, watcher::Error>>>,
    listed: Option<K>,
    backoff: DefaultBackoff,
    retry_at: Option<Instant>,
}

impl<K> Watch<K>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    pub fn new(api: Api<K>, name: &str) -> Self {
        Self {
            api,
            config: watcher::Config::default().fields(&format!("metadata.name={name}")),
            stream: None,
            listed: None,
            backoff: DefaultBackoff::default(),
            retry_at: None,
        }
    }

    /// The next thing that is seen. May be dropped at any time: nothing is lost.
    pub async fn next(&mut self) -> Seen<K> {
        loop {
            if let Some(at) = self.retry_at {
                sleep_until(at).await;
                self.retry_at = None;
            }
            let stream =
                self.stream.get_or_insert_with(|| watcher(self.api.clone(), self.config.clone()).boxed());
            match stream.next().await {
                Some(Ok(Event::Init)) => self.listed = None,
                Some(Ok(Event::InitApply(object))) => self.listed = Some(object),
                Some(Ok(Event::InitDone)) => return Seen::Synced(self.listed.take()),
                Some(Ok(Event::Apply(object))) => return Seen::Changed(object),
                Some(Ok(Event::Delete(object))) => return Seen::Gone(object),
                Some(Err(error)) => {
                    self.pause();
                    return Seen::Failed(error);
                }
                None => self.pause(),
            }
        }
    }

    fn pause(&mut self) {
        self.stream = None;
        self.retry_at = self.backoff.next().map(|delay| Instant::now() + delay);
    }
}
