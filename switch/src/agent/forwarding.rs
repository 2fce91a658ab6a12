//! The forwarding pipeline configuration: verify, save, commit, read.

use bluebridge_p4::p4info::{DEVICE_CONFIG, PIPELINE_NAME, cookie, differences, p4info};
use bluebridge_p4::proto::p4::v1;
use tonic::Code;
use v1::get_forwarding_pipeline_config_request::ResponseType;
use v1::set_forwarding_pipeline_config_request::Action;

use super::refusal::{Refusal, invalid, not_found};
use super::state::AgentState;

/// The committed configuration, and the saved one.
#[derive(Debug, Default)]
pub(super) struct Pipeline {
    committed: Option<v1::ForwardingPipelineConfig>,
    saved: Option<v1::ForwardingPipelineConfig>,
}

impl Pipeline {
    /// The pipeline that an earlier agent committed: there is only one, so its cookie identifies it.
    pub(super) fn restored(cookie: Option<u64>) -> Self {
        let committed = cookie.map(|cookie| v1::ForwardingPipelineConfig {
            p4info: Some(p4info()),
            p4_device_config: DEVICE_CONFIG.to_vec(),
            cookie: Some(v1::forwarding_pipeline_config::Cookie { cookie }),
        });
        Self { committed, saved: None }
    }

    /// Refuses a request that needs a pipeline while there is none.
    pub(super) fn check_committed(&self) -> Result<(), Refusal> {
        if self.committed.is_some() {
            return Ok(());
        }
        let message = "no forwarding pipeline config is set; push one first";
        Err(Refusal::Request(Code::FailedPrecondition, message.to_owned()))
    }

    /// Refuses writes while a saved pipeline is not committed yet.
    pub(super) fn check_writable(&self) -> Result<(), Refusal> {
        self.check_committed()?;
        if self.saved.is_none() {
            return Ok(());
        }
        let message = "a saved pipeline waits for COMMIT; writes before it would be lost";
        Err(Refusal::Request(Code::FailedPrecondition, message.to_owned()))
    }
}

impl AgentState {
    /// `SetForwardingPipelineConfig` (specification, section 14).
    pub(super) fn set_pipeline(
        &mut self,
        request: v1::SetForwardingPipelineConfigRequest,
    ) -> Result<(), Refusal> {
        self.arbitration.check_primary(
            request.device_id,
            &request.role,
            request.election_id.as_ref(),
        )?;
        let action = Action::try_from(request.action).unwrap_or(Action::Unspecified);
        match (action, request.config) {
            (Action::Unspecified, _) => Err(invalid("the action is missing or unknown")),
            (Action::Commit, Some(_)) => Err(invalid("COMMIT must not have a config")),
            (Action::Commit, None) => {
                let saved = self.pipeline.saved.take();
                let saved = saved.ok_or_else(|| not_found("no config was saved"))?;
                self.commit(saved)
            }
            (_, None) => Err(invalid("the config is missing")),
            (action, Some(config)) => {
                verify(&config)?;
                self.realize(action, config)
            }
        }
    }

    fn realize(
        &mut self,
        action: Action,
        config: v1::ForwardingPipelineConfig,
    ) -> Result<(), Refusal> {
        match action {
            Action::VerifyAndSave => self.pipeline.saved = Some(config),
            Action::VerifyAndCommit => self.commit(config)?,
            // The tables are the same before and after, so all entries can be kept.
            Action::ReconcileAndCommit if self.pipeline.committed.is_some() => {
                self.pipeline = Pipeline { committed: Some(config), saved: None };
            }
            Action::ReconcileAndCommit => self.commit(config)?,
            Action::Verify | Action::Commit | Action::Unspecified => {}
        }
        Ok(())
    }

    fn commit(&mut self, config: v1::ForwardingPipelineConfig) -> Result<(), Refusal> {
        // Without a cookie from the controller, the declaration's cookie shows that there is a pipeline.
        let cookie = config.cookie.as_ref().map_or_else(cookie, |given| given.cookie);
        self.clear(cookie)?;
        tracing::info!(cookie, "a controller set the pipeline, which emptied the tables");
        self.pipeline = Pipeline { committed: Some(config), saved: None };
        Ok(())
    }

    /// `GetForwardingPipelineConfig` (specification, section 15).
    pub(super) fn pipeline_config(
        &self,
        request: &v1::GetForwardingPipelineConfigRequest,
    ) -> Result<v1::GetForwardingPipelineConfigResponse, Refusal> {
        self.arbitration.check_device(request.device_id, false)?;
        let wanted = ResponseType::try_from(request.response_type)
            .map_err(|_| invalid("the response_type is unknown"))?;
        let (info, device) = match wanted {
            ResponseType::All => (true, true),
            ResponseType::CookieOnly => (false, false),
            ResponseType::P4infoAndCookie => (true, false),
            ResponseType::DeviceConfigAndCookie => (false, true),
        };
        let config = self.pipeline.committed.as_ref().map(|config| v1::ForwardingPipelineConfig {
            p4info: if info { config.p4info.clone() } else { None },
            p4_device_config: if device { config.p4_device_config.clone() } else { Vec::new() },
            cookie: config.cookie,
        });
        Ok(v1::GetForwardingPipelineConfigResponse { config })
    }
}

/// Refuses every pipeline except this switch's own.
fn verify(config: &v1::ForwardingPipelineConfig) -> Result<(), Refusal> {
    let theirs = config.p4info.as_ref().ok_or_else(|| invalid("the p4info is missing"))?;
    let differences = differences(theirs);
    if !differences.is_empty() {
        let message = format!("not this switch's p4info: {}", differences.join("; "));
        return Err(invalid(message));
    }
    if !config.p4_device_config.is_empty() && config.p4_device_config != DEVICE_CONFIG {
        let message = format!(
            "the p4_device_config is not that of {PIPELINE_NAME}; omit it or send {:?}",
            String::from_utf8_lossy(DEVICE_CONFIG)
        );
        return Err(invalid(message));
    }
    Ok(())
}
