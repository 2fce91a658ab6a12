//! The northbound API over TLS: which peers accept each other.
#![cfg(feature = "tls")]

#[expect(dead_code, reason = "this test needs a part of the helpers")]
mod support;

use std::time::Duration;

use bluebridge_controller::{SwitchAddress, TlsPaths};
use bluebridge_northbound::proto::{PurgeRequest, operations_client::OperationsClient};
use bluebridge_northbound::{Connection, Membership, MembershipError, Options};
use bluebridge_testkit::Scratch;
use rcgen::{CertificateParams, CertifiedIssuer, KeyPair};
use support::{Agent, Running, client};
use tonic::Code;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

/// A root and the certificates that it issues.
struct Root(CertifiedIssuer<'static, KeyPair>);

impl Root {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// A certificate for a name and its key, as PEM.
    fn issue(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new([name.to_owned()]).unwrap();
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }
}

fn trust(root: &Root) -> ClientTlsConfig {
    ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(root.0.pem()))
        .domain_name("controller.test")
}

fn join(
    controller: &Running,
    name: &str,
    tls: Option<ClientTlsConfig>,
) -> Result<Membership, MembershipError> {
    let options =
        Options { join_deadline: Duration::from_secs(3), tls: tls.clone(), ..Options::default() };
    let scheme = if tls.is_some() { "https" } else { "http" };
    let uri = controller.uri().replace("http", scheme);
    Membership::join_with(&uri, client(name, 1), options)
}

#[test]
fn both_sides_prove_themselves() {
    let (folder, root, stranger) = (Scratch::new("tls"), Root::new(), Root::new());
    let (certificate, key) = root.issue("controller.test");
    let file = |name: &str, text: &str| {
        std::fs::write(folder.file(name), text).unwrap();
        folder.file(name)
    };
    let agent = Agent::start(2);
    let mut config = Running::config(&agent);
    config.tls = Some(TlsPaths {
        certificate: file("controller.pem", &certificate),
        key: file("controller.key", &key),
        client_root: Some(file("root.pem", &root.0.pem())),
    });
    let controller = Running::start_with(config);

    let mine = root.issue("c1");
    let proven = trust(&root).identity(Identity::from_pem(mine.0, mine.1));
    let membership = join(&controller, "c1", Some(proven.clone())).unwrap();
    assert!(membership.heartbeat_count() == 0 || membership.assignment().installed);

    let others = root.issue("c2");
    let others = trust(&root).identity(Identity::from_pem(others.0, others.1));
    for (name, tls) in [("c1", &others), ("c2", &proven), ("C1", &proven)] {
        let refused = join(&controller, name, Some(tls.clone()));
        let expected = matches!(&refused, Err(MembershipError::Invalid(text))
            if text.contains(&format!("not for the name {name}")));
        assert!(expected, "{name}: {refused:?}");
    }
    let untouched = membership.snapshot().connection == Connection::Connected;
    assert!(untouched, "the holder of the port and the name continues");
    membership.leave().unwrap();
    join(&controller, "c2", Some(others)).unwrap().leave().unwrap();

    let forged = stranger.issue("c1");
    let forged = trust(&root).identity(Identity::from_pem(forged.0, forged.1));
    let known = root.issue("c1");
    let elsewhere = trust(&root).domain_name("another.test");
    let elsewhere = elsewhere.identity(Identity::from_pem(known.0, known.1));
    for (tls, whose) in [
        (
            Some(trust(&stranger)),
            "its certificate is not trusted (invalid peer certificate: BadSignature): it was not issued under",
        ),
        (Some(elsewhere), "specify a name of that certificate as the TLS name"),
    ] {
        assert_untrusted(join(&controller, "c1", tls), whose);
    }
    // The controller closes at once, and its alert may be lost: then the text has a hint.
    for (tls, hint) in [
        (None, ["plain gRPC", "it may require TLS"]),
        (Some(trust(&root)), ["certificate of this endpoint"; 2]),
        (Some(forged), ["certificate of this endpoint"; 2]),
    ] {
        let error = join(&controller, "c1", tls).expect_err("refused");
        let hint = match &error {
            MembershipError::Untrusted { .. } => hint[0],
            MembershipError::Closed { .. } => hint[1],
            other => panic!("{other:?}"),
        };
        assert!(error.to_string().contains(hint), "{error}");
    }
}

#[test]
fn only_operators_inspect_memory_servers_if_certificates_are_required() {
    let (folder, root) = (Scratch::new("tls-operators"), Root::new());
    let (certificate, key) = root.issue("controller.test");
    let file = |name: &str, text: &str| {
        std::fs::write(folder.file(name), text).unwrap();
        folder.file(name)
    };
    let agent = Agent::start(2);
    let mut config = Running::config(&agent);
    config.tls = Some(TlsPaths {
        certificate: file("controller.pem", &certificate),
        key: file("controller.key", &key),
        client_root: Some(file("root.pem", &root.0.pem())),
    });
    config.operators = vec!["alice".to_owned()];
    let controller = Running::start_with(config);
    let runtime = support::runtime();
    let ask = |name: &str| {
        let (certificate, key) = root.issue(name);
        let tls = trust(&root).identity(Identity::from_pem(certificate, key));
        let endpoint = Endpoint::from_shared(controller.uri().replace("http", "https")).unwrap();
        let endpoint = endpoint.tls_config(tls).unwrap();
        runtime.block_on(async {
            let mut calls = OperationsClient::new(endpoint.connect().await.unwrap());
            let purge = PurgeRequest { server: 1, space: 1, ..PurgeRequest::default() };
            calls.purge(purge).await.expect_err("there is no memory server").code()
        })
    };
    assert_eq!(ask("alice"), Code::NotFound, "she may, and learns that there is none");
    assert_eq!(ask("c1"), Code::PermissionDenied);
}

fn assert_untrusted(refused: Result<Membership, MembershipError>, whose: &str) {
    let expected = matches!(&refused, Err(MembershipError::Untrusted { reason, .. })
        if reason.contains(whose));
    assert!(expected, "{whose}: {refused:?}");
}

#[test]
fn a_plain_controller_and_a_missing_one_are_different_errors() {
    let agent = Agent::start(2);
    let controller = Running::start(&agent, None);
    join(&controller, "c1", None).unwrap().leave().unwrap();
    assert_untrusted(join(&controller, "c1", Some(trust(&Root::new()))), "does not speak TLS");
    let gone = controller.uri();
    drop(controller);
    let options = Options { join_deadline: Duration::from_secs(2), ..Options::default() };
    let refused = Membership::join_with(&gone, client("c1", 1), options);
    let expected = matches!(&refused, Err(MembershipError::Unreachable { reason, .. })
        if reason.contains("refused"));
    assert!(expected, "{refused:?}");
}

#[tokio::test]
async fn missing_and_wrong_files_are_named() {
    let folder = Scratch::new("tls-files");
    let (certificate, key) = Root::new().issue("x");
    let (_, other_key) = Root::new().issue("x");
    let damaged = "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n";
    for (name, text) in [
        ("empty.pem", ""),
        ("certificate.pem", &certificate),
        ("key.pem", &key),
        ("other.pem", &other_key),
        ("damaged.pem", damaged),
        ("hollow.pem", &damaged.replace('!', "AAAA")),
        ("broken.pem", &damaged.replace("CERTIFICATE", "PRIVATE KEY")),
        (
            "secret.pem",
            &damaged.replace("CERTIFICATE", "ENCRYPTED PRIVATE KEY").replace('!', "AAAA"),
        ),
    ] {
        std::fs::write(folder.file(name), text).unwrap();
    }
    for (certificate, key, root, words) in [
        ("missing.pem", "key.pem", None, "missing.pem: No such file"),
        (
            "empty.pem",
            "key.pem",
            None,
            "empty.pem contains no PEM block -----BEGIN CERTIFICATE-----",
        ),
        ("key.pem", "key.pem", None, "key.pem contains no PEM block -----BEGIN CERTIFICATE-----"),
        ("certificate.pem", "missing.pem", None, "missing.pem: No such file"),
        (
            "certificate.pem",
            "certificate.pem",
            None,
            "certificate.pem contains no PEM block -----BEGIN PRIVATE KEY-----",
        ),
        (
            "certificate.pem",
            "other.pem",
            None,
            "other.pem is not the private key of the certificate in",
        ),
        ("damaged.pem", "key.pem", None, "damaged.pem contains no certificate that can be read"),
        ("hollow.pem", "key.pem", None, "hollow.pem contains no certificate that can be read"),
        ("certificate.pem", "broken.pem", None, "broken.pem contains no private key that can be"),
        ("certificate.pem", "secret.pem", None, "secret.pem is encrypted; use a decrypted copy"),
        (
            "certificate.pem",
            "key.pem",
            Some("key.pem"),
            "key.pem contains no PEM block -----BEGIN CERTIFICATE-----",
        ),
        (
            "certificate.pem",
            "key.pem",
            Some("damaged.pem"),
            "damaged.pem contains no certificate that can be read",
        ),
    ] {
        let mut config = bluebridge_controller::Config::new(
            std::net::SocketAddr::from(([127, 0, 0, 1], 0)),
            vec![SwitchAddress::embedded("http://127.0.0.1:9")],
        );
        config.tls = Some(TlsPaths {
            certificate: folder.file(certificate),
            key: folder.file(key),
            client_root: root.map(|root| folder.file(root)),
        });
        let error = bluebridge_controller::run(config, std::future::pending()).await.unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert!(!error.to_string().contains("transport error"), "{error}");
    }
}
