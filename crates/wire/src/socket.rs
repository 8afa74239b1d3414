//! Frames between the CNI plugin and the daemon of its node.
//!
//! A frame is a version, a kind, the length of the body, and the body: fields, each prefixed with its length. Arbitrary
//! input is safe; bytes that are not a frame are an error. A request can carry a file descriptor of the pod's network
//! namespace, because its path is not valid in the daemon's container.

use std::{
    fmt, io,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// The name of the socket in the daemon's run directory.
pub const SOCKET_NAME: &str = "cni.sock";
/// The name of the tombstone directory in the daemon's state directory. A tombstone is a file that holds one request.
pub const TOMBSTONE_DIR: &str = "tombstones";
/// The largest frame, in bytes.
pub const MAX_FRAME: usize = 1 << 20;

/// How long the plugin waits for the reply, with all the time before the daemon listened. Shorter than the plugin timeout of
/// runtimes.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// The key of `CNI_ARGS` that says for how many milliseconds the plugin has waited for the daemon.
const WAITED_ARG: &str = "PATCHBAY_WAITED_MS";

const VERSION: u8 = 1;
const REQUEST: u8 = 1;
const REPLY: u8 = 2;
const HEADER: usize = 6;

/// One call of the runtime to the plugin.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Request {
    /// The name under which the plugin was started.
    pub plugin: String,
    /// `CNI_COMMAND`
    pub command: String,
    /// `CNI_CONTAINERID`
    pub container_id: String,
    /// `CNI_NETNS`
    pub netns: String,
    /// `CNI_IFNAME`
    pub ifname: String,
    /// `CNI_ARGS`
    pub args: String,
    /// `CNI_PATH`
    pub path: String,
    /// The configuration from standard input.
    pub stdin: Vec<u8>,
}

/// The output and exit code of the plugin.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reply {
    pub exit: u8,
    pub stdout: Vec<u8>,
}

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    Request(Request),
    Reply(Reply),
}

/// Bytes are not a frame, or a message does not fit into one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Error {
    /// Longer than [`MAX_FRAME`].
    TooLong,
    /// An unsupported version of the frame format.
    Version(u8),
    /// An unknown kind, or inconsistent field lengths.
    Malformed,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong => write!(f, "a frame is limited to {MAX_FRAME} bytes"),
            Self::Version(version) => write!(f, "unsupported frame version {version}"),
            Self::Malformed => f.write_str("malformed frame"),
        }
    }
}

impl std::error::Error for Error {}

impl Request {
    /// Encodes the request as a frame.
    pub fn encode(&self) -> Result<Vec<u8>, Error> {
        let mut frame = FrameBuilder::new(REQUEST);
        for text in self.texts() {
            frame.field(text.as_bytes());
        }
        frame.field(&self.stdin);
        frame.finish()
    }

    /// A file name that identifies this plugin, sandbox and interface. It consists of hexadecimal digits for any input.
    pub fn key(&self) -> String {
        // FNV-1a with 128 bits. UTF-8 never contains 0xff, so it separates the strings unambiguously.
        let mut hash = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128;
        for text in [&self.plugin, &self.container_id, &self.ifname] {
            for byte in text.bytes().chain([0xff]) {
                hash = (hash ^ u128::from(byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b);
            }
        }
        format!("{hash:032x}")
    }

    /// The call after the plugin waited for the daemon. It says so in `CNI_ARGS`, so that a daemon that does not know the key
    /// can read the call; without `IgnoreUnknown=1`, such a daemon would reject it.
    #[must_use]
    pub fn after_waiting(&self, waited: Duration) -> Self {
        let mut request = self.clone();
        if request.arg("IgnoreUnknown") == Some("1") {
            request.args = format!("{};{WAITED_ARG}={}", request.args, waited.as_millis());
        }
        request
    }

    /// How long the plugin has waited for the daemon.
    pub fn waited(&self) -> Duration {
        let waited = self.arg(WAITED_ARG).and_then(|millis| millis.parse().ok());
        waited.map(Duration::from_millis).unwrap_or_default()
    }

    fn arg(&self, key: &str) -> Option<&str> {
        let mut pairs = self.args.split(';').filter_map(|pair| pair.split_once('='));
        pairs.find(|(name, _)| *name == key).map(|(_, value)| value)
    }

    fn texts(&self) -> [&str; 7] {
        let Self { plugin, command, container_id, netns, ifname, args, path, stdin: _ } = self;
        [plugin, command, container_id, netns, ifname, args, path]
    }

    fn decode(mut body: &[u8]) -> Option<Self> {
        let mut text = || Some(std::str::from_utf8(field(&mut body)?).ok()?.to_owned());
        let texts = Self {
            plugin: text()?,
            command: text()?,
            container_id: text()?,
            netns: text()?,
            ifname: text()?,
            args: text()?,
            path: text()?,
            stdin: Vec::new(),
        };
        let stdin = field(&mut body)?.to_owned();
        body.is_empty().then_some(Self { stdin, ..texts })
    }
}

impl Reply {
    /// Encodes the reply as a frame.
    pub fn encode(&self) -> Result<Vec<u8>, Error> {
        let mut frame = FrameBuilder::new(REPLY);
        frame.field(&[self.exit]);
        frame.field(&self.stdout);
        frame.finish()
    }

    fn decode(mut body: &[u8]) -> Option<Self> {
        let &[exit] = field(&mut body)? else { return None };
        let stdout = field(&mut body)?.to_owned();
        body.is_empty().then_some(Self { exit, stdout })
    }
}

/// A frame under construction.
struct FrameBuilder(Vec<u8>);

impl FrameBuilder {
    fn new(kind: u8) -> Self {
        Self(vec![VERSION, kind, 0, 0, 0, 0])
    }

    fn field(&mut self, bytes: &[u8]) {
        // A field that overflows its length also exceeds MAX_FRAME.
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        self.0.extend(length.to_le_bytes());
        self.0.extend(bytes);
    }

    fn finish(mut self) -> Result<Vec<u8>, Error> {
        if self.0.len() > MAX_FRAME {
            return Err(Error::TooLong);
        }
        let length = u32::try_from(self.0.len() - HEADER).map_err(|_| Error::TooLong)?;
        if let Some(field) = self.0.get_mut(2..HEADER) {
            field.copy_from_slice(&length.to_le_bytes());
        }
        Ok(self.0)
    }
}

/// Splits off the first field.
fn field<'a>(body: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (length, rest) = body.split_first_chunk()?;
    let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
    let (field, rest) = rest.split_at_checked(length)?;
    *body = rest;
    Some(field)
}

/// Decodes messages from a stream of bytes.
#[derive(Debug, Default)]
pub struct FrameReader {
    bytes: Vec<u8>,
}

impl FrameReader {
    /// Appends received bytes.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Decodes the next message if it is complete. After an error the stream is unusable.
    pub fn message(&mut self) -> Result<Option<Message>, Error> {
        let &[version, kind, a, b, c, d, ..] = self.bytes.as_slice() else {
            return match self.bytes.first() {
                Some(&version) if version != VERSION => Err(Error::Version(version)),
                _ => Ok(None),
            };
        };
        if version != VERSION {
            return Err(Error::Version(version));
        }
        let length = usize::try_from(u32::from_le_bytes([a, b, c, d])).map_err(|_| Error::TooLong)?;
        if length > MAX_FRAME - HEADER {
            return Err(Error::TooLong);
        }
        let Some(body) = self.bytes.get(HEADER..HEADER + length) else { return Ok(None) };
        let message = match kind {
            REQUEST => Request::decode(body).map(Message::Request),
            REPLY => Reply::decode(body).map(Message::Reply),
            _ => None,
        };
        self.bytes.drain(..HEADER + length);
        message.map(Some).ok_or(Error::Malformed)
    }
}

/// Sends a whole frame; the descriptor accompanies its first byte.
pub fn send(socket: impl AsFd, mut frame: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut descriptor = descriptor;
    while !frame.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if let Some(descriptor) = &descriptor {
            ancillary.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(descriptor)));
        }
        match sendmsg(&socket, &[io::IoSlice::new(frame)], &mut ancillary, SendFlags::NOSIGNAL) {
            Ok(sent) => {
                frame = frame.get(sent..).unwrap_or_default();
                descriptor = None;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Receives available bytes and returns their count; 0 at the end of the stream. A received descriptor replaces
/// `descriptor`; further ones are closed.
pub fn receive(socket: impl AsFd, buffer: &mut [u8], descriptor: &mut Option<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut pieces = [io::IoSliceMut::new(buffer)];
    let received =
        rustix::io::retry_on_intr(|| recvmsg(&socket, &mut pieces, &mut ancillary, RecvFlags::CMSG_CLOEXEC))?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            for received in descriptors {
                *descriptor = Some(received);
            }
        }
    }
    Ok(received.bytes)
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Write as _, os::unix::net::UnixStream};

    use proptest::prelude::*;

    use super::*;

    fn requests() -> impl Strategy<Value = Message> {
        let texts = proptest::array::uniform7("\\PC{0,12}");
        (texts, proptest::collection::vec(any::<u8>(), 0..64)).prop_map(|(texts, stdin)| {
            let [plugin, command, container_id, netns, ifname, args, path] = texts;
            Message::Request(Request { plugin, command, container_id, netns, ifname, args, path, stdin })
        })
    }

    fn replies() -> impl Strategy<Value = Message> {
        (any::<u8>(), proptest::collection::vec(any::<u8>(), 0..64))
            .prop_map(|(exit, stdout)| Message::Reply(Reply { exit, stdout }))
    }

    fn encode(message: &Message) -> Vec<u8> {
        match message {
            Message::Request(request) => request.encode().unwrap(),
            Message::Reply(reply) => reply.encode().unwrap(),
        }
    }

    fn read_all(reader: &mut FrameReader) -> Vec<Message> {
        std::iter::from_fn(|| reader.message().unwrap()).collect()
    }

    proptest! {
        #[test]
        fn every_split_of_the_input_gives_the_same_messages(
            messages in proptest::collection::vec(prop_oneof![requests(), replies()], 1..4),
            pieces in proptest::collection::vec(1_usize..40, 1..20),
        ) {
            let bytes = messages.iter().flat_map(encode).collect::<Vec<_>>();
            let (mut reader, mut read, mut rest) = (FrameReader::default(), Vec::new(), bytes.as_slice());
            let mut pieces = pieces.iter().cycle();
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(rest.len().min(*pieces.next().unwrap()));
                reader.feed(piece);
                read.extend(read_all(&mut reader));
                rest = after;
            }
            prop_assert_eq!(read, messages);
        }

        #[test]
        fn arbitrary_bytes_never_make_the_reader_panic(
            header in proptest::option::of(Just([VERSION, REQUEST])),
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let mut reader = FrameReader::default();
            reader.feed(&header.unwrap_or_default());
            reader.feed(&bytes);
            while let Ok(Some(_)) = reader.message() {}
        }
    }

    /// Plugins and daemons of different versions talk to each other, and tombstones outlive an upgrade.
    #[test]
    fn frames_and_tombstone_names_keep_their_bytes() {
        let [plugin, command, container_id, ifname] =
            ["patchbay-bridge", "DEL", "c1", "net1"].map(str::to_owned);
        let request =
            Request { plugin, command, container_id, ifname, stdin: b"{}".to_vec(), ..Request::default() };
        let bytes = b"\x01\x01\x3a\0\0\0\
            \x0f\0\0\0patchbay-bridge\x03\0\0\0DEL\x02\0\0\0c1\0\0\0\0\
            \x04\0\0\0net1\0\0\0\0\0\0\0\0\x02\0\0\0{}";
        assert_eq!(request.encode().unwrap(), bytes);
        assert_eq!(request.key(), "efb5e4e46b4d405ecb3ee47d5a84cb00");
        let reply = Reply { exit: 1, stdout: b"x".to_vec() };
        assert_eq!(reply.encode().unwrap(), b"\x01\x02\x0a\0\0\0\x01\0\0\0\x01\x01\0\0\0x");
    }

    #[test]
    fn the_time_that_the_plugin_waited_is_in_arguments_that_older_daemons_ignore() {
        let request = |args: &str| Request { args: args.to_owned(), ..Request::default() };
        let kubelet = request("IgnoreUnknown=1;K8S_POD_NAME=web");
        let later = kubelet.after_waiting(Duration::from_millis(2500));
        assert_eq!(later.args, "IgnoreUnknown=1;K8S_POD_NAME=web;PATCHBAY_WAITED_MS=2500");
        assert_eq!((kubelet.waited(), later.waited()), (Duration::ZERO, Duration::from_millis(2500)));
        for strict in ["", "IgnoreUnknown=0;K8S_POD_NAME=web"] {
            assert_eq!(request(strict).after_waiting(Duration::from_secs(1)), request(strict));
        }
        assert_eq!(request("PATCHBAY_WAITED_MS=x").waited(), Duration::ZERO);
    }

    #[test]
    fn bytes_that_are_not_a_frame_are_an_error() {
        let read = |bytes: &[u8]| {
            let mut reader = FrameReader::default();
            reader.feed(bytes);
            reader.message()
        };
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&[VERSION, REQUEST, 9, 0, 0, 0, 0]), Ok(None));
        assert_eq!(read(b"G"), Err(Error::Version(b'G')));
        assert_eq!(read(b"GET / HTTP/1.1"), Err(Error::Version(b'G')));
        assert_eq!(read(&[VERSION, REQUEST, 255, 255, 255, 255]), Err(Error::TooLong));
        assert_eq!(read(&[VERSION, 7, 0, 0, 0, 0]), Err(Error::Malformed));
        assert_eq!(read(&[VERSION, REPLY, 5, 0, 0, 0, 2, 0, 0, 0, 1]), Err(Error::Malformed));
        let mut longer = Reply::default().encode().unwrap();
        longer[2] += 1;
        longer.push(0);
        assert_eq!(read(&longer), Err(Error::Malformed));
    }

    #[test]
    fn a_request_larger_than_a_frame_is_not_encoded() {
        let request = Request { stdin: vec![0; MAX_FRAME], ..Request::default() };
        assert_eq!(request.encode(), Err(Error::TooLong));
    }

    #[test]
    fn a_key_is_a_safe_file_name_and_differs_per_interface() {
        let key = |plugin: &str, container_id: &str, ifname: &str| {
            let [plugin, container_id, ifname] = [plugin, container_id, ifname].map(str::to_owned);
            Request { plugin, container_id, ifname, ..Request::default() }.key()
        };
        let keys = [key("a", "b", "c"), key("a", "bc", ""), key("ab", "", "c"), key("../", "/etc\0", "..")];
        let all: std::collections::BTreeSet<_> = keys.iter().collect();
        assert_eq!(all.len(), keys.len());
        assert!(keys.iter().all(|key| key.len() == 32 && key.bytes().all(|b| b.is_ascii_hexdigit())));
        assert_eq!(key("a", "b", "c"), key("a", "b", "c"));
    }

    #[test]
    fn a_descriptor_is_received_with_the_request() {
        let (client, server) = UnixStream::pair().unwrap();
        let request = Request { command: "ADD".to_owned(), stdin: vec![7; 100], ..Request::default() };
        let zero = File::open("/dev/null").unwrap();
        send(&client, &request.encode().unwrap(), Some(zero.as_fd())).unwrap();
        drop(client);
        let (mut reader, mut descriptor, mut buffer) = (FrameReader::default(), None, [0; 16]);
        loop {
            match receive(&server, &mut buffer, &mut descriptor).unwrap() {
                0 => break,
                length => reader.feed(&buffer[..length]),
            }
        }
        assert_eq!(reader.message(), Ok(Some(Message::Request(request))));
        File::from(descriptor.unwrap()).write_all(b"x").unwrap_err();
    }
}
