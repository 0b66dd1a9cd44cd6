// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// resolver resolves the identities of endpoints at the identity service, which takes references for
// their owners.
type resolver struct {
	cfg        *Config
	registry   *registry
	refreshDue atomic.Bool // an endpoint has an identity without a reference
}

// standInAfter bounds the wait for the identity service when the identity of an endpoint with the same labels can be
// used instead. The service knows the label set and answers from memory, so a longer wait does not help. A process
// stopped by a signal still accepts connections but never answers.
const standInAfter = 3 * time.Second

// resolve resolves the identity. If the identity service is not available, it returns the identity
// of a live endpoint with the same labels and ports: that endpoint's reference keeps the number
// alive, and Refresh takes a reference for this endpoint as soon as it can.
func (v *resolver) resolve(ctx context.Context, s endpoint.Spec) (endpoint.Identity, error) {
	equal, ok := v.equal(s)
	if !ok {
		return v.resolveNow(ctx, s)
	}
	asked, cancel := context.WithTimeout(ctx, standInAfter)
	defer cancel()
	id, err := v.resolveNow(asked, s)
	away := errors.Is(err, endpoint.ErrUnavailable) || err != nil && asked.Err() != nil
	if !away || errors.Is(err, endpoint.ErrPodUnknown) || ctx.Err() != nil {
		return id, err
	}
	v.refreshDue.Store(true)
	v.cfg.Log.WarnContext(ctx, "identity service unavailable; using the identity of an endpoint with the same labels",
		"owner", s.Owner.String(), "identity", equal.Number, log.Err(err))
	return equal, nil
}

// resolveNow calls the identity service and stores the tenant that it returns.
func (v *resolver) resolveNow(ctx context.Context, s endpoint.Spec) (endpoint.Identity, error) {
	id, err := v.cfg.Identities.Resolve(ctx, s)
	if err == nil {
		v.noteTenant(s, id)
	}
	return id, err
}

// equal returns the identity of a live endpoint with the same labels and ports.
func (v *resolver) equal(s endpoint.Spec) (endpoint.Identity, bool) {
	for _, r := range v.registry.live() {
		if r.StandsInFor(s) {
			return r.Identity, true
		}
	}
	return endpoint.Identity{}, false
}

// askTenant calls a function that claims host ports. If it returns ErrFull, askTenant gets the
// tenant of the pod's namespace from the identity service and calls the function again: the tenant
// is otherwise learned only after the claim, so it is unknown for the first pod of a namespace.
func (v *resolver) askTenant(ctx context.Context, s endpoint.Spec, claim func(endpoint.Spec) error) error {
	err := claim(s)
	if !errors.Is(err, endpoint.ErrFull) || s.Pod.Namespace == "" {
		return err
	}
	asked, cancel := context.WithTimeout(ctx, standInAfter)
	defer cancel()
	id, perr := v.cfg.Identities.Preview(asked, s)
	if perr != nil || id.Tenant == (shares.Tenant{}) {
		return err
	}
	v.noteTenant(s, id)
	return claim(s)
}

// noteTenant sets the tenant of a namespace whose pod has host ports, if it is known.
func (v *resolver) noteTenant(s endpoint.Spec, id endpoint.Identity) {
	if len(s.PortMappings) > 0 && s.Pod.Namespace != "" && id.Tenant != (shares.Tenant{}) {
		v.cfg.HostPorts.SetTenant(s.Pod.Namespace, id.Tenant)
	}
}
