//! The northbound API over TLS: who may speak to whom.
#![cfg(feature = "tls")]

#[expect(dead_code, reason = "this test needs a part of the helpers")]
mod support;

use std::time::Duration;

use bluebridge_controller::TlsPaths;
use bluebridge_northbound::{Connection, Membership, MembershipError, Options};
use rcgen::{CertificateParams, CertifiedIssuer, KeyPair};
use support::{Agent, Folder, Running, client};
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

/// A root, and what it vouches for.
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
    let (folder, root, stranger) = (Folder::new("tls"), Root::new(), Root::new());
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
    assert!(membership.beat_count() == 0 || membership.assignment().installed);

    let others = root.issue("c2");
    let others = trust(&root).identity(Identity::from_pem(others.0, others.1));
    for (name, tls) in [("c1", &others), ("c2", &proven), ("C1", &proven)] {
        let refused = join(&controller, name, Some(tls.clone()));
        let told = matches!(&refused, Err(MembershipError::Invalid(text))
            if text.contains(&format!("not for the name {name}")));
        assert!(told, "{name}: {refused:?}");
    }
    let untouched = membership.snapshot().connection == Connection::Connected;
    assert!(untouched, "the holder of the port and the name goes on");
    membership.leave().unwrap();
    join(&controller, "c2", Some(others)).unwrap().leave().unwrap();

    let forged = stranger.issue("c1");
    let forged = trust(&root).identity(Identity::from_pem(forged.0, forged.1));
    let known = root.issue("c1");
    let elsewhere = trust(&root).domain_name("another.test");
    let elsewhere = elsewhere.identity(Identity::from_pem(known.0, known.1));
    for (tls, whose) in [
        (Some(trust(&stranger)), "its certificate is not to be trusted (BadSignature)"),
        (Some(elsewhere), "for the name by which it is joined"),
    ] {
        assert_untrusted(join(&controller, "c1", tls), whose);
    }
    // The controller closes at once, and its alert may be lost: then the text asks.
    for (tls, hint) in [
        (None, ["plain gRPC", "does it ask for TLS?"]),
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

fn assert_untrusted(refused: Result<Membership, MembershipError>, whose: &str) {
    let told = matches!(&refused, Err(MembershipError::Untrusted { reason, .. })
        if reason.contains(whose));
    assert!(told, "{whose}: {refused:?}");
}

#[test]
fn a_plain_controller_is_told_from_one_that_is_not_there() {
    let agent = Agent::start(2);
    let controller = Running::start(&agent, None);
    join(&controller, "c1", None).unwrap().leave().unwrap();
    assert_untrusted(join(&controller, "c1", Some(trust(&Root::new()))), "does not speak TLS");
    let gone = controller.uri();
    drop(controller);
    let options = Options { join_deadline: Duration::from_secs(2), ..Options::default() };
    let refused = Membership::join_with(&gone, client("c1", 1), options);
    let told = matches!(&refused, Err(MembershipError::Unreachable { reason, .. })
        if reason.contains("refused"));
    assert!(told, "{refused:?}");
}

#[tokio::test]
async fn missing_and_wrong_files_are_named() {
    let folder = Folder::new("tls-files");
    std::fs::write(folder.file("empty.pem"), "").unwrap();
    for certificate in ["missing.pem", "empty.pem"] {
        let mut config = bluebridge_controller::Config::new(
            std::net::SocketAddr::from(([127, 0, 0, 1], 0)),
            "http://127.0.0.1:9",
        );
        config.tls = Some(TlsPaths {
            certificate: folder.file(certificate),
            key: folder.file("empty.pem"),
            client_root: None,
        });
        let error = bluebridge_controller::run(config, std::future::pending()).await.unwrap_err();
        assert!(error.to_string().starts_with("TLS: "), "{error}");
    }
}
