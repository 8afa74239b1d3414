//! `lab-record`: a CNI plugin that records its calls and misbehaves on request. Standard library only, linked statically.
//!
//! Each call is one file in `/var/log/lab/cni-calls`. It is written at the start of the call, and written again at its end
//! with `ended`, `exitCode` and `stdout`. A call that was killed has no `ended`.
//!
//! Keys of the plugin's configuration:
//! ```text
//! delegate          the configuration of the plugin that does the work: it runs with the same environment; cniVersion,
//!                   name, args, runtimeConfig and prevResult are copied into it
//! add, del, check…  options for the command of that name:
//!   hang            seconds to wait before the delegate runs
//!   fail            a CNI error ({"code": 11, "msg": "…"}) to print instead of running the delegate; exit code 1
//!   child           seconds for which a child process lives that keeps stdout open
//!   memory          MiB to allocate and touch
//!   hangAfter       seconds to wait after the delegate succeeded
//!   failAfter       a CNI error to print after the delegate succeeded
//!   deviceInfo      the content of the file that runtimeConfig.CNIDeviceInfoFile names
//!   print           text to print instead of the result
//!   printBytes      the number of bytes of garbage to print instead of the result
//!   result          the result to print instead of the delegate's
//!   merge           top-level keys of the result to replace
//!   extraInterfaces interfaces to append to those of the result
//!   mtu             the mtu of each interface of the result that has a sandbox
//!   exit            the exit code
//! ```
//! Strings in `print`, `result`, `merge`, `extraInterfaces` and `fail` may contain `$CNI_NETNS`, `$CNI_IFNAME` and
//! `$CNI_CONTAINERID`. Without a delegate, ADD returns `prevResult`, or else a result without interfaces.

use std::{
    collections::BTreeMap,
    env, fmt, fs,
    hint::black_box,
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio, exit},
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

const CALLS: &str = "/var/log/lab/cni-calls";

fn main() {
    let mut stdin = String::new();
    if let Err(e) = io::stdin().read_to_string(&mut stdin) {
        stdin = format!("unreadable: {e}");
    }
    let mut call = Call::start(stdin);
    let (output, code) = match call.run() {
        Ok(output) => output,
        Err(reason) => (error(999, &format!("lab-record: {reason}")).to_string(), 1),
    };
    call.finish(&output, code);
    let mut stdout = io::stdout();
    // The caller may have closed the pipe: it limits how much it reads.
    let _ = stdout.write_all(output.as_bytes()).and_then(|()| stdout.flush());
    exit(code);
}

struct Call {
    path: PathBuf,
    stdin: String,
    command: String,
    record: BTreeMap<String, Json>,
}

impl Call {
    fn start(stdin: String) -> Self {
        let started = now();
        let me = std::process::id();
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let link = |path: &str| fs::read_link(path).map(|p| p.display().to_string()).unwrap_or_default();
        let status = read("/proc/self/status");
        let field = |name: &str| {
            let line = status.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
            line.unwrap_or_default().trim().to_owned()
        };
        let environment = env::vars_os()
            .map(|(k, v)| (k.to_string_lossy().into_owned(), Json::text(v.to_string_lossy())))
            .collect();
        let program = env::args().next().unwrap_or_default();
        let command = env::var("CNI_COMMAND").unwrap_or_default();
        let record = [
            ("program", Json::text(program.rsplit('/').next().unwrap_or_default())),
            ("command", Json::text(&command)),
            ("stdin", Json::text(&stdin)),
            ("environment", Json::Object(environment)),
            ("pid", Json::number(u128::from(me))),
            ("caller", Json::text(read(&format!("/proc/{}/comm", field("PPid"))))),
            ("mountNamespace", Json::text(link("/proc/self/ns/mnt"))),
            ("networkNamespace", Json::text(link("/proc/self/ns/net"))),
            ("processGroup", Json::Number(process_group())),
            ("cgroup", Json::text(read("/proc/self/cgroup"))),
            ("oomScoreAdj", Json::Number(read("/proc/self/oom_score_adj"))),
            ("capabilities", Json::text(field("CapEff"))),
            ("started", Json::number(started)),
        ];
        let call = Self {
            path: Path::new(CALLS).join(format!("{started:020}-{me}.json")),
            stdin,
            command,
            record: record.into_iter().map(|(k, v)| (k.to_owned(), v)).collect(),
        };
        call.save();
        call
    }

    /// Writes the record atomically. A record that cannot be written must not change what the plugin does.
    fn save(&self) {
        let partial = self.path.with_extension("partial");
        let text = Json::Object(self.record.clone()).to_string();
        let saved = fs::create_dir_all(CALLS)
            .and_then(|()| fs::write(&partial, text))
            .and_then(|()| fs::rename(&partial, &self.path));
        if let Err(e) = saved {
            eprintln!("lab-record: write {}: {e}", self.path.display());
        }
    }

    fn finish(&mut self, output: &str, code: i32) {
        let kept: String = output.chars().take(100_000).collect();
        self.record.insert("stdout".to_owned(), Json::Text(kept));
        self.record.insert("exitCode".to_owned(), Json::Number(code.to_string()));
        self.record.insert("ended".to_owned(), Json::number(now()));
        self.save();
    }

    /// What to print, and the exit code.
    fn run(&self) -> Result<(String, i32), String> {
        if self.command == "VERSION" {
            let versions = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];
            let supported = Json::Array(versions.iter().map(Json::text).collect());
            return Ok((
                object([("cniVersion", Json::text("1.1.0")), ("supportedVersions", supported)]).to_string(),
                0,
            ));
        }
        let config = Json::parse(&self.stdin)?;
        let options = config.get(&self.command.to_lowercase()).cloned().unwrap_or(Json::Object(BTreeMap::new()));
        let code = options.get("exit").and_then(Json::as_integer).and_then(|c| i32::try_from(c).ok());
        if let Some(seconds) = options.get("child").and_then(Json::as_integer) {
            // Not waited for: it outlives this process.
            let child = Command::new("sleep").arg(seconds.to_string()).stdin(Stdio::null()).spawn();
            child.map_err(|e| format!("start sleep: {e}"))?;
        }
        let memory = options.get("memory").and_then(Json::as_integer).unwrap_or(0);
        let touched = black_box(vec![1_u8; usize::try_from(memory).unwrap_or(0) << 20]);
        wait(&options, "hang");
        if let Some(failure) = options.get("fail") {
            return Ok((expand(failure).to_string(), code.unwrap_or(1)));
        }
        let mut result = match config.get("delegate") {
            Some(delegate) => match self.delegate(&config, delegate)? {
                (output, 0) => (!output.trim().is_empty()).then(|| Json::parse(&output)).transpose()?,
                failed => return Ok(failed),
            },
            None => (self.command == "ADD").then(|| config.get("prevResult").cloned().unwrap_or(empty(&config))),
        };
        wait(&options, "hangAfter");
        drop(touched);
        if let Some(failure) = options.get("failAfter") {
            return Ok((expand(failure).to_string(), code.unwrap_or(1)));
        }
        if let Some(info) = options.get("deviceInfo") {
            write_device_info(&config, info)?;
        }
        if let Some(text) = options.get("print").and_then(Json::as_text) {
            return Ok((substitute(text), code.unwrap_or(0)));
        }
        if let Some(count) = options.get("printBytes").and_then(Json::as_integer) {
            return Ok(("x".repeat(usize::try_from(count).unwrap_or(0)), code.unwrap_or(0)));
        }
        if let Some(replaced) = options.get("result") {
            result = Some(expand(replaced));
        }
        if let Some(result) = &mut result {
            adapt(result, &options);
        }
        Ok((result.map(|r| r.to_string()).unwrap_or_default(), code.unwrap_or(0)))
    }

    /// Runs the delegate with the same environment.
    fn delegate(&self, config: &Json, delegate: &Json) -> Result<(String, i32), String> {
        let Json::Object(mut delegate) = delegate.clone() else { return Err("delegate is not an object".to_owned()) };
        for key in ["cniVersion", "name", "args", "runtimeConfig", "prevResult"] {
            if let Some(value) = config.get(key)
                && !delegate.contains_key(key)
            {
                delegate.insert(key.to_owned(), value.clone());
            }
        }
        let kind = delegate.get("type").and_then(Json::as_text).ok_or("delegate has no type")?.to_owned();
        let path = env::var_os("CNI_PATH").unwrap_or_default();
        let found = env::split_paths(&path).map(|dir| dir.join(&kind)).find(|p| p.is_file());
        let plugin = found.ok_or_else(|| format!("no plugin {kind} in CNI_PATH"))?;
        let mut child = Command::new(&plugin)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| format!("start {}: {e}", plugin.display()))?;
        let mut stdin = child.stdin.take().ok_or("the delegate has no stdin")?;
        stdin.write_all(Json::Object(delegate).to_string().as_bytes()).map_err(|e| format!("write to {kind}: {e}"))?;
        drop(stdin);
        let output = child.wait_with_output().map_err(|e| format!("wait for {kind}: {e}"))?;
        Ok((String::from_utf8_lossy(&output.stdout).into_owned(), output.status.code().unwrap_or(1)))
    }
}

fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos()
}

/// The process group, the fifth field of `/proc/self/stat`.
fn process_group() -> String {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    after_name.split_whitespace().nth(2).unwrap_or_default().to_owned()
}

fn wait(options: &Json, key: &str) {
    if let Some(seconds) = options.get(key).and_then(Json::as_number) {
        thread::sleep(Duration::try_from_secs_f64(seconds).unwrap_or_default());
    }
}

fn error(code: u32, message: &str) -> Json {
    object([("cniVersion", Json::text("1.0.0")), ("code", Json::number(code.into())), ("msg", Json::text(message))])
}

/// A result without interfaces.
fn empty(config: &Json) -> Json {
    let version = config.get("cniVersion").and_then(Json::as_text).unwrap_or("0.2.0");
    object([("cniVersion", Json::text(version))])
}

fn adapt(result: &mut Json, options: &Json) {
    let Json::Object(keys) = result else { return };
    if let Some(Json::Object(merge)) = options.get("merge") {
        keys.extend(merge.iter().map(|(k, v)| (k.clone(), expand(v))));
    }
    if let Some(Json::Array(extra)) = options.get("extraInterfaces") {
        let interfaces = keys.entry("interfaces".to_owned()).or_insert_with(|| Json::Array(Vec::new()));
        if let Json::Array(interfaces) = interfaces {
            interfaces.extend(extra.iter().map(expand));
        }
    }
    if let (Some(mtu), Some(Json::Array(interfaces))) = (options.get("mtu"), keys.get_mut("interfaces")) {
        for interface in interfaces {
            if let Json::Object(interface) = interface
                && interface.contains_key("sandbox")
            {
                interface.insert("mtu".to_owned(), mtu.clone());
            }
        }
    }
}

fn write_device_info(config: &Json, info: &Json) -> Result<(), String> {
    let file = config.get("runtimeConfig").and_then(|c| c.get("CNIDeviceInfoFile")).and_then(Json::as_text);
    let file = Path::new(file.ok_or("runtimeConfig has no CNIDeviceInfoFile")?);
    let dir = file.parent().unwrap_or(Path::new("/"));
    let written = fs::create_dir_all(dir).and_then(|()| fs::write(file, info.to_string()));
    written.map_err(|e| format!("write {}: {e}", file.display()))
}

/// Replaces the variables in every string.
fn expand(value: &Json) -> Json {
    match value {
        Json::Text(text) => Json::Text(substitute(text)),
        Json::Array(values) => Json::Array(values.iter().map(expand).collect()),
        Json::Object(keys) => Json::Object(keys.iter().map(|(k, v)| (k.clone(), expand(v))).collect()),
        other => other.clone(),
    }
}

fn substitute(text: &str) -> String {
    ["CNI_NETNS", "CNI_IFNAME", "CNI_CONTAINERID"].iter().fold(text.to_owned(), |text, name| {
        text.replace(&format!("${name}"), &env::var(name).unwrap_or_default())
    })
}

fn object<const N: usize>(keys: [(&str, Json); N]) -> Json {
    Json::Object(keys.into_iter().map(|(k, v)| (k.to_owned(), v)).collect())
}

/// A JSON value. A number stays as it was written.
#[derive(Clone)]
enum Json {
    Literal(&'static str),
    Number(String),
    Text(String),
    Array(Vec<Json>),
    Object(BTreeMap<String, Json>),
}

impl Json {
    fn text(text: impl AsRef<str>) -> Self {
        Self::Text(text.as_ref().to_owned())
    }

    fn number(number: u128) -> Self {
        Self::Number(number.to_string())
    }

    fn get(&self, key: &str) -> Option<&Self> {
        if let Self::Object(keys) = self { keys.get(key) } else { None }
    }

    fn as_text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    fn as_number(&self) -> Option<f64> {
        if let Self::Number(text) = self { text.parse().ok() } else { None }
    }

    fn as_integer(&self) -> Option<i64> {
        if let Self::Number(text) = self { text.parse().ok() } else { None }
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut parser = Parser { rest: text };
        let value = parser.value()?;
        parser.skip_space();
        if parser.rest.is_empty() { Ok(value) } else { Err("text after the JSON value".to_owned()) }
    }
}

struct Parser<'a> {
    rest: &'a str,
}

impl Parser<'_> {
    fn skip_space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn take(&mut self, token: &str) -> bool {
        self.skip_space();
        self.rest.strip_prefix(token).map(|rest| self.rest = rest).is_some()
    }

    fn expect(&mut self, token: &str) -> Result<(), String> {
        if self.take(token) {
            return Ok(());
        }
        Err(format!("expected {token} at {:?}", self.rest.chars().take(20).collect::<String>()))
    }

    fn value(&mut self) -> Result<Json, String> {
        for literal in ["null", "true", "false"] {
            if self.take(literal) {
                return Ok(Json::Literal(literal));
            }
        }
        if self.take("{") {
            return self.object();
        }
        if self.take("[") {
            return self.array();
        }
        if self.take("\"") {
            return self.string().map(Json::Text);
        }
        let end = self.rest.find(|c: char| !"+-.eE0123456789".contains(c)).unwrap_or(self.rest.len());
        let (number, rest) = self.rest.split_at(end);
        if number.is_empty() {
            return Err(format!("no JSON value at {:?}", rest.chars().take(20).collect::<String>()));
        }
        self.rest = rest;
        Ok(Json::Number(number.to_owned()))
    }

    fn object(&mut self) -> Result<Json, String> {
        let mut keys = BTreeMap::new();
        while !self.take("}") {
            if !keys.is_empty() {
                self.expect(",")?;
            }
            self.expect("\"")?;
            let key = self.string()?;
            self.expect(":")?;
            keys.insert(key, self.value()?);
        }
        Ok(Json::Object(keys))
    }

    fn array(&mut self) -> Result<Json, String> {
        let mut values = Vec::new();
        while !self.take("]") {
            if !values.is_empty() {
                self.expect(",")?;
            }
            values.push(self.value()?);
        }
        Ok(Json::Array(values))
    }

    /// The rest of a string, after its opening quote.
    fn string(&mut self) -> Result<String, String> {
        let mut text = String::new();
        let mut chars = self.rest.chars();
        loop {
            match chars.next().ok_or("a string has no end")? {
                '"' => break,
                '\\' => match chars.next().ok_or("a string has no end")? {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    'b' => text.push('\u{8}'),
                    'f' => text.push('\u{c}'),
                    'u' => {
                        let hex: String = chars.by_ref().take(4).collect();
                        let code = u32::from_str_radix(&hex, 16).map_err(|e| format!("\\u{hex}: {e}"))?;
                        text.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
                    }
                    other => text.push(other),
                },
                other => text.push(other),
            }
        }
        self.rest = chars.as_str();
        Ok(text)
    }
}

impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Literal(text) => f.write_str(text),
            Self::Number(text) => f.write_str(if text.is_empty() { "0" } else { text }),
            Self::Text(text) => quote(text, f),
            Self::Array(values) => {
                f.write_str("[")?;
                for (index, value) in values.iter().enumerate() {
                    write!(f, "{}{value}", if index > 0 { "," } else { "" })?;
                }
                f.write_str("]")
            }
            Self::Object(keys) => {
                f.write_str("{")?;
                for (index, (key, value)) in keys.iter().enumerate() {
                    f.write_str(if index > 0 { "," } else { "" })?;
                    quote(key, f)?;
                    write!(f, ":{value}")?;
                }
                f.write_str("}")
            }
        }
    }
}

fn quote(text: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_str("\"")?;
    for c in text.chars() {
        match c {
            '"' => f.write_str("\\\"")?,
            '\\' => f.write_str("\\\\")?,
            c if u32::from(c) < 0x20 => write!(f, "\\u{:04x}", u32::from(c))?,
            c => write!(f, "{c}")?,
        }
    }
    f.write_str("\"")
}
