//! List and watch of the objects of a kind: of one by name, of those that a selector selects, or of all.
//!
//! Either as a stream of single objects ([`stream`]), so that no caller holds a whole list, or with complete lists of
//! projected objects ([`ObjectWatch`]).
//!
//! kube's `watcher` does not tell when a broken watch is established again, and neither limits the time for a page of a
//! list nor for the start of a watch. Otherwise the states are the same.

use std::{collections::VecDeque, fmt::Debug, time::Duration};

use futures::{
    StreamExt as _,
    stream::{self, BoxStream},
};
use kube::{
    Api, Resource,
    api::{ListParams, VersionMatch, WatchParams},
    core::{Status, WatchEvent},
};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep_until, timeout};

use crate::retry::Backoff;

/// The API server ends a watch after this time, and the next one continues at its resource version. This bounds how long
/// a silently lost connection stays unnoticed.
pub const WATCH_TIMEOUT: Duration = Duration::from_secs(60);
/// How much later a watch that the API server should have ended counts as lost.
const IDLE_MARGIN: Duration = Duration::from_secs(5);
/// How long the API server may take to accept a watch, or to send one page of a list.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest time between the last response of the API server and [`StreamEvent::Failed`]: for so long, a caller may
/// wrongly believe that it has contact.
pub const DETECTION_TIME: Duration =
    Duration::from_secs(WATCH_TIMEOUT.as_secs() + IDLE_MARGIN.as_secs() + RESPONSE_TIMEOUT.as_secs());
/// A watch that ends sooner than this and delivers nothing is not renewed at once, and does not reset the backoff.
const MIN_WATCH: Duration = Duration::from_secs(1);
/// The objects of one page of a list, unless set otherwise. A page is held as text, for a moment twice, and an object can
/// have 1.5 MiB: 150 MiB for the largest page.
pub const PAGE_SIZE: u32 = 50;

/// Why a watch failed. It goes on after a backoff.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the API server did not respond within {} s", .0.as_secs())]
    Deadline(Duration),
    #[error("list the objects")]
    List(#[source] kube::Error),
    #[error("start the watch")]
    Start(#[source] kube::Error),
    #[error("the watch failed")]
    Watch(#[source] kube::Error),
    #[error("the API server sent an object or a list without a resourceVersion")]
    NoResourceVersion,
}

impl Error {
    /// The status with which the API server responded.
    fn status(&self) -> Option<&Status> {
        match self {
            Self::List(kube::Error::Api(status))
            | Self::Start(kube::Error::Api(status))
            | Self::Watch(kube::Error::Api(status)) => Some(status),
            _ => None,
        }
    }

    /// Whether the API server does not serve the kind in the requested version.
    fn is_not_served(&self) -> bool {
        matches!(self, Self::List(_) | Self::Start(_))
            && self.status().is_some_and(|status| status.code == 404)
    }

    /// Whether the last resource version is still good: the API server did not respond, or it (or a load balancer) responded
    /// that it cannot serve anything now. Any other response may be about the resource version, as 410 is, or 504 after a
    /// restored backup.
    fn keeps_position(&self) -> bool {
        match self {
            Self::Deadline(_) => true,
            Self::NoResourceVersion | Self::Watch(kube::Error::SerdeError(_)) => false,
            Self::List(_) | Self::Start(_) | Self::Watch(_) => {
                self.status().is_none_or(|status| matches!(status.code, 429 | 502 | 503))
            }
        }
    }
}

/// An event of a [`stream`].
#[derive(Debug)]
pub enum StreamEvent<K> {
    /// A list starts. It may fail and start again.
    ListStarted,
    /// An object of the list, or one that was created or changed later.
    Applied(K),
    Deleted(K),
    /// The list is complete: other objects do not exist.
    ListDone,
    /// The first response after a failure, unless that was a list. No change was missed.
    Resumed,
    /// The API server does not serve the kind. Retried after a backoff, with a new list.
    NotServed(Error),
    /// Retried after a backoff.
    Failed(Error),
}

/// What to do after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterFailure {
    /// Resume the watch at the last resource version, and list only if that is not safe.
    Resume,
    /// List again, so that every recovery confirms all objects.
    Relist,
}

/// Which objects to watch, and how.
#[derive(Clone, Debug)]
pub struct WatchConfig {
    labels: Option<String>,
    fields: Option<String>,
    page_size: u32,
    page_timeout: Duration,
    after_failure: AfterFailure,
    backoff: Backoff,
}

impl WatchConfig {
    /// All objects.
    pub fn all() -> Self {
        Self {
            labels: None,
            fields: None,
            page_size: PAGE_SIZE,
            page_timeout: RESPONSE_TIMEOUT,
            after_failure: AfterFailure::Resume,
            backoff: Backoff::default(),
        }
    }

    /// The object of this name, which need not exist.
    pub fn one(name: &str) -> Self {
        Self::all().fields(&format!("metadata.name={name}"))
    }

    /// The objects that the label selector selects.
    pub fn labelled(selector: &str) -> Self {
        Self { labels: Some(selector.to_owned()), ..Self::all() }
    }

    /// Restricts the watch to objects that the field selector selects.
    #[must_use]
    pub fn fields(self, selector: &str) -> Self {
        Self { fields: Some(selector.to_owned()), ..self }
    }

    /// The number of objects in one page of a list. One page at a time is held in memory, as text and decoded.
    #[must_use]
    pub fn page_size(self, page_size: u32) -> Self {
        Self { page_size, ..self }
    }

    /// How long the API server may take for one page of a list.
    #[must_use]
    pub fn page_timeout(self, page_timeout: Duration) -> Self {
        Self { page_timeout, ..self }
    }

    #[must_use]
    pub fn after_failure(self, after_failure: AfterFailure) -> Self {
        Self { after_failure, ..self }
    }

    #[must_use]
    pub fn backoff(self, backoff: Backoff) -> Self {
        Self { backoff, ..self }
    }

    fn list_params(&self, token: Option<String>) -> ListParams {
        ListParams {
            label_selector: self.labels.clone(),
            field_selector: self.fields.clone(),
            limit: Some(self.page_size),
            continue_token: token,
            ..ListParams::default()
        }
    }

    fn watch_params(&self) -> WatchParams {
        WatchParams {
            label_selector: self.labels.clone(),
            field_selector: self.fields.clone(),
            timeout: u32::try_from(WATCH_TIMEOUT.as_secs()).ok(),
            bookmarks: true,
            send_initial_events: false,
        }
    }
}

/// The states of a watch.
enum State<K> {
    /// The list has not started.
    Unlisted,
    /// The next page is requested.
    Page(Option<String>),
    /// The objects of a page are delivered.
    Deliver {
        objects: VecDeque<K>,
        next: AfterPage,
    },
    /// The list is complete, and the watch is started at this version.
    Listed(String),
    Watching(Watching<K>),
    /// Nothing is sent until then.
    Waiting {
        until: Instant,
        next: Box<State<K>>,
    },
}

/// What follows a page of a list.
enum AfterPage {
    /// Another page, by its token.
    Page(String),
    /// The watch from this version.
    Watch(String),
}

/// An established watch.
struct Watching<K> {
    version: String,
    stream: BoxStream<'static, kube::Result<WatchEvent<K>>>,
    started: Instant,
    /// Whether anything was received.
    received: bool,
}

/// Lists and watches. Progresses only while it is polled.
struct Watcher<K> {
    api: Api<K>,
    config: WatchConfig,
    state: State<K>,
    backoff: Backoff,
    /// Whether a failure was reported and nothing since.
    failed: bool,
}

/// Lists and watches objects. Ends never; retries all failures after a backoff. `next()` of the stream is cancel safe.
pub fn stream<K>(api: Api<K>, config: WatchConfig) -> BoxStream<'static, StreamEvent<K>>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    positioned(api, config).map(|(event, _)| event).boxed()
}

/// Like [`stream`], with the resourceVersion that the watch has reached after each event. Every change up to that version
/// was delivered, and none after it. None while a list is in progress, and if the version is not a number.
pub fn positioned<K>(api: Api<K>, config: WatchConfig) -> BoxStream<'static, (StreamEvent<K>, Option<u64>)>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let backoff = config.backoff.clone();
    let watcher = Watcher { api, config, state: State::Unlisted, backoff, failed: false };
    stream::unfold(watcher, async |mut watcher| {
        let event = watcher.next().await;
        let position = watcher.position();
        Some(((event, position), watcher))
    })
    .boxed()
}

impl<K> Watcher<K>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    /// Runs until the next event.
    async fn next(&mut self) -> StreamEvent<K> {
        loop {
            let event = match std::mem::replace(&mut self.state, State::Unlisted) {
                State::Unlisted => {
                    self.state = State::Page(None);
                    Some(StreamEvent::ListStarted)
                }
                State::Page(token) => self.request_page(token).await,
                State::Deliver { objects, next } => self.deliver(objects, next),
                State::Listed(version) => self.start_watch(version).await,
                State::Watching(watching) => self.receive(watching).await,
                State::Waiting { until, next } => {
                    sleep_until(until).await;
                    self.state = *next;
                    None
                }
            };
            if let Some(event) = event {
                return event;
            }
        }
    }

    fn position(&self) -> Option<u64> {
        let mut state = &self.state;
        loop {
            state = match state {
                State::Unlisted | State::Page(_) | State::Deliver { .. } => return None,
                State::Listed(version) | State::Watching(Watching { version, .. }) => {
                    return version.parse().ok();
                }
                State::Waiting { next, .. } => next,
            };
        }
    }

    async fn request_page(&mut self, token: Option<String>) -> Option<StreamEvent<K>> {
        let params = self.config.list_params(token);
        let limit = self.config.page_timeout;
        let page = match timeout(limit, self.api.list(&params)).await {
            Ok(Ok(page)) => page,
            Ok(Err(error)) => return Some(self.fail(Error::List(error), None)),
            Err(_) => return Some(self.fail(Error::Deadline(limit), None)),
        };
        let token = page.metadata.continue_.filter(|token| !token.is_empty());
        let version = page.metadata.resource_version.filter(|version| !version.is_empty());
        let next = match (token, version) {
            (Some(token), _) => AfterPage::Page(token),
            (None, Some(version)) => AfterPage::Watch(version),
            (None, None) => return Some(self.fail(Error::NoResourceVersion, None)),
        };
        self.state = State::Deliver { objects: page.items.into(), next };
        None
    }

    fn deliver(&mut self, mut objects: VecDeque<K>, next: AfterPage) -> Option<StreamEvent<K>> {
        if let Some(object) = objects.pop_front() {
            self.state = State::Deliver { objects, next };
            return Some(StreamEvent::Applied(object));
        }
        match next {
            AfterPage::Page(token) => {
                self.state = State::Page(Some(token));
                None
            }
            AfterPage::Watch(version) => {
                self.state = State::Listed(version);
                self.failed = false;
                Some(StreamEvent::ListDone)
            }
        }
    }

    async fn start_watch(&mut self, version: String) -> Option<StreamEvent<K>> {
        if self.failed
            && let Err(error) = self.check_version(&version).await
        {
            return Some(self.fail(error, Some(version)));
        }
        let params = self.config.watch_params();
        let stream = match timeout(RESPONSE_TIMEOUT, self.api.watch(&params, &version)).await {
            Ok(Ok(stream)) => stream.boxed(),
            Ok(Err(error)) => return Some(self.fail(Error::Start(error), Some(version))),
            Err(_) => return Some(self.fail(Error::Deadline(RESPONSE_TIMEOUT), Some(version))),
        };
        self.state = State::Watching(Watching { version, stream, started: Instant::now(), received: false });
        std::mem::take(&mut self.failed).then_some(StreamEvent::Resumed)
    }

    /// Checks that the API server has reached this version. After a restored backup it has not: it accepts a watch from a
    /// future version, and sends nothing until it has reached that version again.
    async fn check_version(&mut self, version: &str) -> Result<(), Error> {
        let params = ListParams {
            limit: Some(1),
            resource_version: Some(version.to_owned()),
            version_match: Some(VersionMatch::NotOlderThan),
            ..self.config.list_params(None)
        };
        match timeout(RESPONSE_TIMEOUT, self.api.list(&params)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(Error::Start(error)),
            Err(_) => Err(Error::Deadline(RESPONSE_TIMEOUT)),
        }
    }

    async fn receive(&mut self, mut watching: Watching<K>) -> Option<StreamEvent<K>> {
        let received = timeout(WATCH_TIMEOUT + IDLE_MARGIN, watching.stream.next()).await;
        let (event, version) = match received {
            Ok(Some(Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)))) => {
                let version = object.meta().resource_version.clone();
                (Some(StreamEvent::Applied(object)), version)
            }
            Ok(Some(Ok(WatchEvent::Deleted(object)))) => {
                let version = object.meta().resource_version.clone();
                (Some(StreamEvent::Deleted(object)), version)
            }
            Ok(Some(Ok(WatchEvent::Bookmark(bookmark)))) => (None, Some(bookmark.metadata.resource_version)),
            Ok(Some(Ok(WatchEvent::Error(status)))) => {
                return Some(self.fail(Error::Watch(kube::Error::Api(status)), Some(watching.version)));
            }
            Ok(Some(Err(error))) => return Some(self.fail(Error::Watch(error), Some(watching.version))),
            // The API server ended the watch, or the connection is lost: the next request shows which.
            Ok(None) | Err(_) => {
                self.renew(watching);
                return None;
            }
        };
        let Some(version) = version.filter(|version| !version.is_empty()) else {
            return Some(self.fail(Error::NoResourceVersion, None));
        };
        self.backoff.reset();
        self.state = State::Watching(Watching { version, received: true, ..watching });
        event
    }

    /// Continues a watch that has ended.
    fn renew(&mut self, watching: Watching<K>) {
        let next = State::Listed(watching.version);
        if watching.received || watching.started.elapsed() >= MIN_WATCH {
            self.backoff.reset();
            self.state = next;
        } else {
            self.wait(next);
        }
    }

    /// Reports a failure. Continues at `version` if that is allowed and safe, otherwise with a new list.
    fn fail(&mut self, error: Error, version: Option<String>) -> StreamEvent<K> {
        let resumes = self.config.after_failure == AfterFailure::Resume && error.keeps_position();
        self.wait(version.filter(|_| resumes).map_or(State::Unlisted, State::Listed));
        self.failed = true;
        if error.is_not_served() { StreamEvent::NotServed(error) } else { StreamEvent::Failed(error) }
    }

    fn wait(&mut self, next: State<K>) {
        let until = Instant::now() + self.backoff.next_delay();
        self.state = State::Waiting { until, next: Box::new(next) };
    }
}

/// An event of an [`ObjectWatch`].
#[derive(Debug)]
pub enum ObjectEvent<T> {
    /// The complete list: the first event, and, if the watch lists again after a failure, the first one after it.
    Synced(Vec<T>),
    Changed(T),
    Deleted(T),
    /// The first response after a failure, unless that is [`Synced`](Self::Synced). No change was missed.
    Resumed,
    /// The watch failed and restarts after a backoff.
    Failed(Error),
}

/// Watches objects, and collects each list of them. Each object is projected as soon as it is decoded.
pub struct ObjectWatch<T> {
    stream: BoxStream<'static, StreamEvent<T>>,
    /// The objects of the list in progress; None between lists.
    listing: Option<Vec<T>>,
}

impl<T> ObjectWatch<T>
where
    T: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    pub fn new(api: Api<T>, config: WatchConfig) -> Self {
        Self { stream: stream(api, config), listing: None }
    }
}

impl<T: Send + 'static> ObjectWatch<T> {
    /// Watches objects and keeps only what `project` returns of each.
    pub fn projected<K>(
        api: Api<K>,
        config: WatchConfig,
        mut project: impl FnMut(K) -> T + Send + 'static,
    ) -> Self
    where
        K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        let projected = stream(api, config).map(move |event| match event {
            StreamEvent::ListStarted => StreamEvent::ListStarted,
            StreamEvent::Applied(object) => StreamEvent::Applied(project(object)),
            StreamEvent::Deleted(object) => StreamEvent::Deleted(project(object)),
            StreamEvent::ListDone => StreamEvent::ListDone,
            StreamEvent::Resumed => StreamEvent::Resumed,
            StreamEvent::NotServed(error) => StreamEvent::NotServed(error),
            StreamEvent::Failed(error) => StreamEvent::Failed(error),
        });
        Self { stream: projected.boxed(), listing: None }
    }

    /// The next event. Cancel safe.
    pub async fn next(&mut self) -> ObjectEvent<T> {
        loop {
            let Some(event) = self.stream.next().await else {
                return std::future::pending().await;
            };
            match event {
                StreamEvent::ListStarted => self.listing = Some(Vec::new()),
                StreamEvent::Applied(object) => match &mut self.listing {
                    Some(listing) => listing.push(object),
                    None => return ObjectEvent::Changed(object),
                },
                StreamEvent::Deleted(object) => return ObjectEvent::Deleted(object),
                StreamEvent::ListDone => {
                    return ObjectEvent::Synced(self.listing.take().unwrap_or_default());
                }
                StreamEvent::Resumed => return ObjectEvent::Resumed,
                StreamEvent::NotServed(error) | StreamEvent::Failed(error) => {
                    self.listing = None;
                    return ObjectEvent::Failed(error);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
