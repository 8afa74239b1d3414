//! What plugins read, in which order they run, and what is kept of their results.

use super::*;

/// The configuration of three plugins.
fn list(version: &str) -> Value {
    json!({"cniVersion": version, "name": "net", "plugins": [
        {"type": "one", "key": 1e3}, {"type": "two"}, {"type": "three"},
    ]})
}

/// The DNS settings in the result of a plugin that prints none.
fn prev_result_dns(version: &str) -> Option<Value> {
    let config = ConfigVersion::of(&request(&list(version)).config).unwrap();
    let json = PluginResult::from_output(b"{}", &config).unwrap().json;
    json.to_value().unwrap().get("dns").cloned()
}

fn three(node: &TestNode) {
    node.recorder(
        "one",
        &json!({"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.2/24"}], "x": {"y": [1]}}),
    );
    let two = json!({"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.2/24"}], "routes": [{"dst": "10.1.0.0/16"}], "dns": {}});
    node.recorder("two", &two);
    node.recorder("three", &result());
}

#[tokio::test]
async fn a_plugin_gets_the_result_of_the_one_before() {
    let node = TestNode::new("chain");
    three(&node);
    let added = node.executor.add_now(&request(&list("1.0.0"))).await.unwrap();
    assert_eq!(node.calls(), ["0-ADD-one", "1-ADD-two", "2-ADD-three"]);
    let first = node.stdin("0-ADD-one");
    assert_eq!(first, json!({"type": "one", "key": 1e3, "name": "net", "cniVersion": "1.0.0"}));
    // Fields that Patchbay does not know survive.
    let prev = json!({"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.2/24"}], "x": {"y": [1]}});
    assert_eq!(node.stdin("1-ADD-two")["prevResult"], prev);
    assert_eq!(node.stdin("2-ADD-three")["prevResult"]["routes"][0]["dst"], "10.1.0.0/16");
    // As with libcni, empty DNS settings are in results before 1.0.0 and not in later ones.
    assert_eq!(node.stdin("2-ADD-three")["prevResult"].get("dns"), None);
    assert_eq!(prev_result_dns("0.4.0"), Some(json!({})));
    assert_eq!(serde_json::from_str::<Value>(&added.result).unwrap(), result());
    assert_eq!(added.success.ips[0].address.to_string(), "10.0.0.2/24");
    assert_eq!(added.device_info, None);
}

#[tokio::test]
async fn the_environment_is_that_of_cni_and_the_number_of_the_call() {
    let node = TestNode::new("environment");
    node.recorder("one", &result());
    let mut request = one("one");
    node.executor.add_now(&request).await.unwrap();
    request.netns = None;
    node.executor.del_all(&request, None).await.unwrap();
    let dirs = format!("{0}/first:{0}/bin", node.root.display());
    for (call, verb, netns) in [("0-ADD-one", "ADD", "/var/run/netns/x"), ("1-DEL-one", "DEL", "")] {
        let text = node.read(&format!("calls/{call}/env"));
        // The shell of the script sets PWD and the like.
        let shell =
            |line: &&str| !["PWD=", "OLDPWD=", "_=", "SHLVL="].iter().any(|key| line.starts_with(key));
        let mut lines: Vec<&str> = text.split_terminator('\0').filter(shell).collect();
        lines.sort_unstable();
        let number = lines.remove(6);
        assert!(number.starts_with("PATCHBAY_CALL="), "{number}");
        let expected = [
            "CNI_ARGS=IgnoreUnknown=true;K8S_POD_NAME=p".to_owned(),
            format!("CNI_COMMAND={verb}"),
            "CNI_CONTAINERID=abc".to_owned(),
            "CNI_IFNAME=net1".to_owned(),
            format!("CNI_NETNS={netns}"),
            format!("CNI_PATH={dirs}"),
            "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned(),
        ];
        assert_eq!(lines, expected);
        assert_eq!(node.read(&format!("calls/{call}/pwd")), "/\n");
    }
}

#[tokio::test]
async fn del_runs_in_reverse_with_the_final_result() {
    let node = TestNode::new("del");
    three(&node);
    let request = request(&list("1.0.0"));
    node.executor.del_all(&request, Some(&result().to_string())).await.unwrap();
    assert_eq!(node.calls(), ["0-DEL-three", "1-DEL-two", "2-DEL-one"]);
    for call in node.calls() {
        assert_eq!(node.stdin(&call)["prevResult"], result());
    }
}

#[tokio::test]
async fn del_without_a_result_uses_the_cache_and_removes_it() {
    let node = TestNode::new("del-cache");
    three(&node);
    let request = request(&list("1.0.0"));
    node.executor.add_now(&request).await.unwrap();
    assert!(node.cache_file(&request).exists());
    node.executor.del_all(&request, None).await.unwrap();
    assert_eq!(node.stdin("3-DEL-three")["prevResult"], result());
    assert!(!node.cache_file(&request).exists());
    // Neither a result nor a cache: DEL runs without.
    node.executor.del_all(&request, None).await.unwrap();
    assert_eq!(node.stdin("6-DEL-three").get("prevResult"), None);
    // A result that is none is as good as no result.
    node.executor.del_all(&request, Some("[]")).await.unwrap();
    assert_eq!(node.stdin("9-DEL-three").get("prevResult"), None);
}

#[tokio::test]
async fn del_goes_on_after_a_failure_and_returns_the_first() {
    let node = TestNode::new("del-failure");
    three(&node);
    let request = request(&list("1.0.0"));
    node.executor.add_now(&request).await.unwrap();
    node.plugin("three", r#"echo '{"code": 7, "msg": "third"}'; exit 1"#);
    node.plugin("two", "exit 1");
    let error = node.executor.del_all(&request, None).await.unwrap_err();
    assert_eq!(error.to_string(), "plugin three failed: third");
    assert_eq!(node.calls().last().unwrap(), "3-DEL-one");
    // The next DEL needs the result.
    assert!(node.cache_file(&request).exists());
}

#[tokio::test]
async fn a_del_that_only_releases_addresses_asks_the_ipam_plugin_of_a_failing_main_plugin() {
    let node = TestNode::new("del-release");
    three(&node);
    let mut config = list("1.0.0");
    config["plugins"][0]["ipam"] = json!({"type": "addresses"});
    let request = request(&config);
    node.executor.add_now(&request).await.unwrap();
    node.plugin("three", "exit 1");
    let del = |errors| node.executor.del(&request, None, errors);
    del(DelErrors::ReleaseAddresses).await.unwrap_err();
    assert_eq!(node.calls().last().unwrap(), "4-DEL-one", "the main plugin succeeded");
    node.plugin("one", "exit 1");
    del(DelErrors::Abandon).await.unwrap_err();
    node.recorder("addresses", &json!({}));
    let released = || node.calls().iter().filter(|call| call.ends_with("-DEL-addresses")).count();
    // The addresses are released, and the plugins are called again.
    let error = del(DelErrors::ReleaseAddresses).await.unwrap_err();
    assert!(error.to_string().starts_with("plugin three failed"), "{error}");
    let last = node.calls().last().unwrap().clone();
    assert_eq!((released(), &node.stdin(&last)["ipam"]["type"]), (1, &json!("addresses")), "{last}");
    // A plugin that was killed may succeed the next time.
    node.plugin("three", "kill -9 $$");
    del(DelErrors::Abandon).await.unwrap_err();
    node.plugin("three", "exit 1");
    assert!(node.cache_file(&request).exists());
    del(DelErrors::Abandon).await.unwrap();
    assert_eq!((released(), node.cache_file(&request).exists()), (3, false));
}

#[tokio::test]
async fn a_del_of_a_plugin_with_its_own_addresses_is_never_given_up() {
    let node = TestNode::new("del-own-addresses");
    three(&node);
    let request = request(&list("1.0.0"));
    node.executor.add_now(&request).await.unwrap();
    node.plugin("one", "exit 1");
    for errors in [DelErrors::ReleaseAddresses, DelErrors::Abandon] {
        node.executor.del(&request, None, errors).await.unwrap_err();
    }
    node.recorder("one", &json!({}));
    node.executor.del(&request, None, DelErrors::Abandon).await.unwrap();
}

/// Go reads the keys of a configuration in any case, so the plugin finds its IPAM plugin there too.
#[tokio::test]
async fn the_ipam_plugin_is_found_as_the_configuration_was_parsed() {
    let node = TestNode::new("del-ipam-case");
    node.recorder("addresses", &json!({}));
    node.plugin("one", "exit 1");
    let request = request(&json!({"cniVersion": "1.0.0", "type": "one", "IPAM": {"Type": "addresses"}}));
    assert_eq!(request.config.plugins[0].ipam.as_deref(), Some("addresses"));
    node.executor.del(&request, None, DelErrors::Abandon).await.unwrap();
    assert!(node.calls().last().unwrap().ends_with("-DEL-addresses"));
}

#[tokio::test]
async fn arguments_that_no_process_can_get_are_refused_before_a_plugin_starts() {
    let node = TestNode::new("long-arguments");
    three(&node);
    let mut request = request(&list("1.0.0"));
    request.cni_args.push(("IP".to_owned(), "10.0.0.1,".repeat(8_000)));
    let error = node.executor.add_now(&request).await.unwrap_err();
    assert!(
        matches!(&error, ExecError::Invalid(text) if text.contains("request fewer addresses")),
        "{error}"
    );
    assert!(matches!(node.executor.del_all(&request, None).await, Err(ExecError::Invalid(_))));
    node.executor.del_unfinished(&request, DelErrors::Fail).await.unwrap();
    assert_eq!(node.calls(), Vec::<String>::new());
}

#[tokio::test]
async fn versions_are_those_of_libcni() {
    let node = TestNode::new("versions");
    node.recorder("one", &json!({"ip4": {"ip": "10.0.0.2/24"}}));
    let old = request(&json!({"type": "one"}));
    let added = node.executor.add_now(&old).await.unwrap();
    // Without a version, plugins read an empty one. The result has the version that this means.
    assert_eq!(node.stdin("0-ADD-one")["cniVersion"], "");
    assert_eq!(added.success.ips.len(), 1);
    assert_eq!(serde_json::from_str::<Value>(&added.result).unwrap()["cniVersion"], "0.1.0");
    // DEL has a result since 0.4.0.
    node.executor.del_all(&old, Some(&added.result)).await.unwrap();
    assert_eq!(node.stdin("1-DEL-one").get("prevResult"), None);

    let version = |config: Value| ConfigVersion::of(&request(&config).config).map(|version| version.text);
    let plugins = json!([{"type": "one"}]);
    let several =
        json!({"cniVersion": "0.3.1", "cniVersions": ["1.0.0", "0.4.0", "9.0.0"], "plugins": plugins});
    assert_eq!(version(several).unwrap(), "1.0.0");
    // libcni reads `cniVersions` of lists only.
    let single = json!({"cniVersion": "0.3.1", "cniVersions": ["1.0.0"], "type": "one"});
    assert_eq!(version(single).unwrap(), "0.3.1");
    assert_eq!(version(json!({"cniVersions": ["1.0.0"], "type": "one"})).unwrap(), "");
    let error = version(json!({"cniVersion": "9.0.0", "type": "one"})).unwrap_err();
    assert!(error.to_string().contains("unsupported cniVersion \"9.0.0\""), "{error}");
}

#[tokio::test]
async fn a_result_in_another_version_is_converted() {
    let node = TestNode::new("convert");
    node.recorder(
        "one",
        &json!({"cniVersion": "0.3.1", "ips": [{"version": "4", "address": "10.0.0.2/24"}]}),
    );
    node.recorder("two", &result());
    let config = json!({"cniVersion": "1.0.0", "plugins": [{"type": "one"}, {"type": "two"}]});
    node.executor.add_now(&request(&config)).await.unwrap();
    let expected = json!({"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.2/24"}]});
    assert_eq!(node.stdin("1-ADD-two")["prevResult"], expected);
}

#[tokio::test]
async fn a_plugin_gets_the_capabilities_that_it_declares() {
    let node = TestNode::new("capabilities");
    node.recorder("one", &result());
    node.recorder("two", &result());
    let mut request = request(&json!({"cniVersion": "1.0.0", "plugins": [
        {"type": "one", "capabilities": {"mac": true, "ips": false, "bandwidth": true}},
        {"type": "two", "capabilities": {"portMappings": true}},
    ]}));
    let args = json!({"mac": "02:00:00:00:00:01", "ips": ["10.0.0.2/24"], "infinibandGUID": "x"});
    request.capability_args = args.as_object().unwrap().clone();
    node.executor.add_now(&request).await.unwrap();
    node.executor.del_all(&request, None).await.unwrap();
    for call in ["0-ADD-one", "3-DEL-one"] {
        assert_eq!(node.stdin(call)["runtimeConfig"], json!({"mac": "02:00:00:00:00:01"}));
    }
    assert_eq!(node.stdin("1-ADD-two").get("runtimeConfig"), None);
}

#[tokio::test]
async fn the_cache_has_the_layout_of_libcni() {
    let node = TestNode::new("cache");
    node.recorder("one", &result());
    let mut request = one("one");
    request.capability_args.insert("mac".to_owned(), json!("02:00:00:00:00:01"));
    node.executor.add_now(&request).await.unwrap();
    let cached: Value = serde_json::from_str(&node.read("cni/results/blue-abc-net1")).unwrap();
    let config = k8s_openapi::ByteString(request.config.text().as_bytes().to_vec());
    let expected = json!({
        "kind": "cniCacheV1", "containerId": "abc", "ifName": "net1", "networkName": "blue", "netns": "/var/run/netns/x",
        "config": config, "cniArgs": [["IgnoreUnknown", "true"], ["K8S_POD_NAME", "p"]],
        "capabilityArgs": {"mac": "02:00:00:00:00:01"}, "result": result(),
        // libcni does not read this key.
        "patchbay.dev/network": request.nad,
    });
    assert_eq!(cached, expected);
    let names: Vec<_> = fs::read_dir(node.root.join("cni/results")).unwrap().collect();
    assert_eq!(names.len(), 1);
}

#[tokio::test]
async fn a_cache_that_cannot_be_written_fails_nothing() {
    let node = TestNode::new("cache-failure");
    node.recorder("one", &result());
    // A file in the place of the directory.
    fs::write(node.root.join("cni"), "").unwrap();
    node.executor.add_now(&one("one")).await.unwrap();
    node.executor.del_all(&one("one"), None).await.unwrap();
}

#[tokio::test]
async fn device_information_is_read_after_add_and_removed_at_del() {
    let node = TestNode::new("device");
    let file = node.root.join("devinfo/cni/default-blue-abc_net1");
    let info = r#"{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:00:01.0"}}"#;
    let write =
        format!("mkdir -p $ROOT/devinfo/cni; echo '{info}' > {}; echo '{}'", file.display(), result());
    node.plugin("one", &format!("cat > $ROOT/stdin; [ $CNI_COMMAND = DEL ] || {{ {write}; }}"));
    let mut request =
        request(&json!({"cniVersion": "1.0.0", "type": "one", "capabilities": {"CNIDeviceInfoFile": true}}));
    // Only an attachment with a device has a file.
    let added = node.executor.add_now(&request).await.unwrap();
    assert_eq!(added.device_info, None);
    assert_eq!(serde_json::from_str::<Value>(&node.read("stdin")).unwrap().get("runtimeConfig"), None);
    request.capability_args.insert("deviceID".to_owned(), json!("0000:00:01.0"));
    let added = node.executor.add_now(&request).await.unwrap();
    assert_eq!(added.device_info.unwrap().pci.unwrap().pci_address, "0000:00:01.0");
    let stdin: Value = serde_json::from_str(&node.read("stdin")).unwrap();
    assert_eq!(stdin["runtimeConfig"], json!({"CNIDeviceInfoFile": file}));
    node.executor.del_all(&request, None).await.unwrap();
    assert!(!file.exists());
    // Information that cannot be read fails nothing.
    fs::create_dir_all(&file).unwrap();
    node.plugin("one", &format!("echo '{}'", result()));
    assert_eq!(node.executor.add_now(&request).await.unwrap().device_info, None);
}

#[tokio::test]
async fn the_first_directory_with_an_executable_file_counts() {
    let node = TestNode::new("lookup");
    node.recorder("one", &result());
    fs::create_dir(node.root.join("first/one")).unwrap();
    node.executor.add_now(&one("one")).await.unwrap();
    fs::remove_dir(node.root.join("first/one")).unwrap();
    fs::write(node.root.join("first/one"), "not executable").unwrap();
    node.executor.add_now(&one("one")).await.unwrap();
    write_plugin(&node.root.join("first/one"), &node.root, "exit 1");
    assert!(matches!(node.executor.add_now(&one("one")).await, Err(ExecError::Plugin { .. })));
    let error = node.executor.add_now(&one("two")).await.unwrap_err().to_string();
    let dirs = format!("{0}/first:{0}/bin", node.root.display());
    let expected =
        format!("plugin two is not in {dirs} of the node; install it there or correct the type in the NAD");
    assert_eq!(error, expected);
}

#[tokio::test]
async fn invalid_requests_start_nothing() {
    let node = TestNode::new("invalid");
    node.recorder("one", &result());
    let change = |change: &dyn Fn(&mut CniRequest)| {
        let mut request = one("one");
        change(&mut request);
        request
    };
    for request in [
        change(&|request| request.container_id = "../x".to_owned()),
        change(&|request| request.container_id = String::new()),
        change(&|request| request.ifname = "a/b".to_owned()),
        change(&|request| request.ifname = "..".to_owned()),
        change(&|request| request.ifname = "abcdefghijklmnop".to_owned()),
        change(&|request| request.netns = Some("\0".to_owned())),
        change(&|request| request.cni_args.push(("a".to_owned(), "\0".to_owned()))),
    ] {
        assert!(matches!(node.executor.add_now(&request).await, Err(ExecError::Invalid(_))), "{request:?}");
        assert!(
            matches!(node.executor.del_all(&request, None).await, Err(ExecError::Invalid(_))),
            "{request:?}"
        );
    }
    assert!(node.calls().is_empty());
}
