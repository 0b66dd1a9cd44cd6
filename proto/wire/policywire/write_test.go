// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policywire

import (
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// TestEnumsAreThoseOfTheModelPlusOne: the enums of the messages begin at 1 and the model's at 0, in
// the same order.
func TestEnumsAreThoseOfTheModelPlusOne(t *testing.T) {
	t.Parallel()
	for kind, want := range map[identity.Kind]policyv1.PeerKind{
		identity.KindInCluster:     policyv1.PeerKind_PEER_KIND_IN_CLUSTER,
		identity.KindWorld4:        policyv1.PeerKind_PEER_KIND_WORLD_IPV4,
		identity.KindWorld6:        policyv1.PeerKind_PEER_KIND_WORLD_IPV6,
		identity.KindHost:          policyv1.PeerKind_PEER_KIND_HOST,
		identity.KindRemoteNode:    policyv1.PeerKind_PEER_KIND_REMOTE_NODE,
		identity.KindKubeAPIServer: policyv1.PeerKind_PEER_KIND_KUBE_APISERVER,
		identity.KindUnknown:       policyv1.PeerKind_PEER_KIND_UNKNOWN,
		identity.KindOther:         policyv1.PeerKind_PEER_KIND_OTHER,
	} {
		if got := Identity(policytable.SetIdentity{Identity: 1, IdentityClass: 2, Kind: kind}).Kind; got != want {
			t.Errorf("kind %s is %s", kind, got)
		}
	}
	for scope, want := range map[identity.PeerScope]policyv1.PeerScope{
		identity.PeerScopeCluster: policyv1.PeerScope_PEER_SCOPE_CLUSTER,
		identity.PeerScopeNode:    policyv1.PeerScope_PEER_SCOPE_NODE,
		identity.PeerScopeOutside: policyv1.PeerScope_PEER_SCOPE_OUTSIDE,
	} {
		if got := Identity(policytable.SetIdentity{Identity: 1, IdentityClass: 2, Scope: scope}).Scope; got != want {
			t.Errorf("scope %d is %s", scope, got)
		}
	}
	for proxy, want := range map[policytable.Proxy]netv1.Proxy{
		policytable.NoProxy: netv1.Proxy_PROXY_UNSPECIFIED, policytable.ProxyDNS: netv1.Proxy_PROXY_DNS,
		policytable.ProxyHTTP: netv1.Proxy_PROXY_HTTP,
		policytable.ProxyTLS:  netv1.Proxy_PROXY_TLS, policytable.ProxyListener: netv1.Proxy_PROXY_LISTENER,
	} {
		if got := Proxy(proxy); got != want {
			t.Errorf("proxy %s is %s", proxy, got)
		}
	}
	for action, want := range map[policytable.Action]policyv1.Action{
		policytable.Deny: policyv1.Action_ACTION_DENY, policytable.Redirect: policyv1.Action_ACTION_REDIRECT,
		policytable.Allow: policyv1.Action_ACTION_ALLOW, policytable.Pass: policyv1.Action_ACTION_PASS,
	} {
		if got := Action(action); got != want {
			t.Errorf("action %s is %s", action, got)
		}
	}
	if got := Identity(policytable.SetIdentity{Identity: 7}); !proto.Equal(got, &policyv1.SetIdentity{Identity: 7}) {
		t.Errorf("unknown identity is %v", got)
	}
}
