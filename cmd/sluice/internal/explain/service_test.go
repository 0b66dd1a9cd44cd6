// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package explain

import (
	"encoding/json"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	"github.com/sluice-net/sluice/cmd/sluice/internal/verdict"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

const (
	translated    = datapathv1.ServiceOutcome_SERVICE_OUTCOME_TRANSLATED
	notTranslated = datapathv1.ServiceOutcome_SERVICE_OUTCOME_NOT_TRANSLATED
	evaluated     = datapathv1.BackendPath_BACKEND_PATH_EVALUATED
	inTransit     = datapathv1.BackendPath_BACKEND_PATH_IN_TRANSIT
	hostSocket    = datapathv1.BackendPath_BACKEND_PATH_HOST_SOCKET
	forwarded     = datapathv1.Verdict_VERDICT_FORWARDED
	dropped       = datapathv1.Verdict_VERDICT_DROPPED
)

// web returns the answer for a connection to a cluster IP.
func web(outcome datapathv1.ServiceOutcome, backends ...*datapathv1.ExplainedBackend) *datapathv1.ExplainResponse {
	return &datapathv1.ExplainResponse{
		Source: &datapathv1.ExplainedPeer{
			Identity: 300, Known: true, IdentityClass: 4, IpcachePrefix: "10.244.0.2/32",
			Owner: &workloadv1.Owner{ContainerId: nodetest.LongID, InterfaceName: "eth0"},
		},
		Service: &datapathv1.ExplainedService{
			Service: "shop/web:http", Address: "10.96.0.10", Port: 80, Kind: datapathv1.FrontendKind_FRONTEND_KIND_CLUSTER_IP,
			Outcome: outcome, BackendCount: uint32(len(backends)), Backends: backends,
		},
	}
}

// at returns a backend with the verdict of a policy rule.
func at(address string, v datapathv1.Verdict) *datapathv1.ExplainedBackend {
	b := &datapathv1.ExplainedBackend{
		Address: address, Port: 8080, Path: evaluated, Verdict: v, Reason: datapathv1.Reason_REASON_FORWARDED_TO_POD,
		Peer: &datapathv1.ExplainedPeer{Identity: 301, Known: true, IdentityClass: 5, IpcachePrefix: address + "/32"},
		Egress: &datapathv1.ExplainedSide{Verdict: &datapathv1.SideVerdict{
			Verdict: forwarded, Table: verdict.TableAllow, DecidedBy: netv1.DecidedBy_DECIDED_BY_NO_POLICY,
		}},
		Ingress: &datapathv1.ExplainedSide{Verdict: &datapathv1.SideVerdict{
			Verdict: v, Table: 17, Rule: 2, DecidedBy: netv1.DecidedBy_DECIDED_BY_RULE,
			RuleSources: []string{"NetworkPolicy shop/web spec.ingress[0]"},
		}},
	}
	if v == dropped {
		b.Reason = datapathv1.Reason_REASON_POLICY_DENIED
	}
	return b
}

func withoutPolicy(address string, path datapathv1.BackendPath) *datapathv1.ExplainedBackend {
	b := &datapathv1.ExplainedBackend{
		Address: address, Port: 8080, Path: path, Peer: &datapathv1.ExplainedPeer{IpcachePrefix: address + "/32"},
	}
	if path == datapathv1.BackendPath_BACKEND_PATH_OWN_NAMESPACE {
		b.Verdict = forwarded
	}
	return b
}

// inTransitAt returns a backend for traffic in transit, which is not evaluated.
func inTransitAt(address string, path datapathv1.BackendPath) *datapathv1.ExplainedBackend {
	b := withoutPolicy(address, path)
	b.Verdict, b.Reason = forwarded, datapathv1.Reason_REASON_FORWARDED_TO_STACK
	if path == inTransit {
		b.SourceAddress = "10.244.0.1"
	}
	return b
}

func TestExplainOfAServiceSaysWhatBecomesOfEachBackend(t *testing.T) {
	own, notLocal := datapathv1.BackendPath_BACKEND_PATH_OWN_NAMESPACE, datapathv1.BackendPath_BACKEND_PATH_NOT_LOCAL
	agreed := web(translated, at("10.244.0.3", forwarded), at("10.244.0.4", forwarded))
	agreed.Verdict, agreed.Reason = forwarded, datapathv1.Reason_REASON_FORWARDED_TO_POD
	otherWays := web(translated, at("10.244.0.3", forwarded), withoutPolicy("10.244.0.2", own))
	otherWays.Verdict = forwarded
	many := web(translated, at("10.244.0.3", forwarded))
	many.Service.BackendCount, many.Verdict = 40, forwarded
	node := web(translated, withoutPolicy("10.244.1.3", notLocal))
	node.Service.Address, node.Service.Port = "0.0.0.0", 30080
	node.Service.Kind = datapathv1.FrontendKind_FRONTEND_KIND_NODE_PORT
	port := web(translated, withoutPolicy("10.244.1.3", notLocal))
	port.Service.Service, port.Service.Address, port.Service.Port = "shop/web-1", "::", 8080
	port.Service.Kind = datapathv1.FrontendKind_FRONTEND_KIND_HOST_PORT
	portOfOne := web(translated, withoutPolicy("10.244.1.3", notLocal))
	portOfOne.Service.Service, portOfOne.Service.Address = "shop/web-1", "192.0.2.1"
	portOfOne.Service.Kind = datapathv1.FrontendKind_FRONTEND_KIND_HOST_PORT
	noPort := web(datapathv1.ServiceOutcome_SERVICE_OUTCOME_NO_PORT)
	noPort.Service.Service, noPort.Service.Kind = "", datapathv1.FrontendKind_FRONTEND_KIND_UNSPECIFIED
	noPortOutside := proto.CloneOf(noPort)
	noPortOutside.Service.Outside = true
	adopted := web(datapathv1.ServiceOutcome_SERVICE_OUTCOME_SOURCE_RANGES)
	adopted.Service.Service, adopted.Service.Kind, adopted.Service.BackendCount = "", 0, 0
	unsourced := at("10.244.1.3", dropped)
	unsourced.Path, unsourced.Ingress, unsourced.Reason = inTransit, nil, datapathv1.Reason_REASON_NAT_NO_SOURCE
	led := web(translated, inTransitAt("10.244.1.3", inTransit), inTransitAt("10.244.1.4", inTransit),
		inTransitAt("192.0.2.1", hostSocket))
	led.Service.Outside, led.Verdict, led.Reason = true, forwarded, datapathv1.Reason_REASON_FORWARDED_TO_STACK
	outside := web(notTranslated)
	outside.Service.Outside, outside.Service.BackendCount = true, 2
	outside.Destination = &datapathv1.ExplainedPeer{}
	empty := []string{"Service shop/web, port http", "Frontend 10.96.0.10:80/TCP, cluster-ip"}
	for name, c := range map[string]struct {
		answer *datapathv1.ExplainResponse
		want   []string
		lacks  []string
	}{
		"backends alike are one group": {agreed, append([]string{
			"10.244.0.2 -> 10.96.0.10, tcp port 80: FORWARDED (forwarded-to-pod)",
			"Backends 2, for connections from this node",
			"from 0123456789abc/eth0 300 4 10.244.0.2/32 -", "to 10.244.0.3:8080 none of this node 301 5 10.244.0.3/32 -",
			"10.244.0.3:8080, 10.244.0.4:8080: FORWARDED (forwarded-to-pod)",
			"egress forwarded because no policy selects it",
			"ingress forwarded by NetworkPolicy shop/web spec.ingress[0]",
		}, empty...), []string{"Connection:"}},
		"others are told apart": {
			web(translated, at("10.244.0.3", forwarded), at("10.244.0.4", dropped)),
			[]string{
				"10.244.0.2 -> 10.96.0.10, tcp port 80: DEPENDS ON THE BACKEND", "10.244.0.3:8080: FORWARDED (forwarded-to-pod)",
				"10.244.0.4:8080: DROPPED (policy-denied)", "ingress dropped by NetworkPolicy shop/web spec.ingress[0]",
			},
			nil,
		},
		"a host port": {port, []string{"Host port of shop/web-1", "Frontend node:8080/TCP, host-port"}, nil},
		"a host port of an address": {
			portOfOne, []string{"Host port of shop/web-1", "Frontend 192.0.2.1:80/TCP, host-port"}, nil,
		},
		"the pod itself": {otherWays, []string{
			"10.244.0.2 -> 10.96.0.10, tcp port 80: FORWARDED",
			"10.244.0.2:8080: FORWARDED inside the pod, where no policy applies",
		}, nil},
		"the rest is counted": {many, []string{
			"Backends 40, for connections from this node; 39 of them are not evaluated",
		}, nil},
		"a node port": {node, []string{
			"10.244.0.2 -> 10.96.0.10, tcp port 80: NO POLICY OF THIS NODE APPLIES", "Frontend node:30080/TCP, node-port",
			"10.244.1.3:8080: not evaluated: neither end is a pod of this node",
		}, nil},
		"no backend": {web(datapathv1.ServiceOutcome_SERVICE_OUTCOME_NO_BACKEND), append([]string{
			"10.244.0.2 -> 10.96.0.10, tcp port 80: REFUSED (no backend)",
			"Backends 0, for connections from this node; refused: no backend",
		}, empty...), []string{"Egress", "Connection"}},
		"no local backend": {web(datapathv1.ServiceOutcome_SERVICE_OUTCOME_NO_LOCAL_BACKEND), append([]string{
			"10.244.0.2 -> 10.96.0.10, tcp port 80: DROPPED (no local backend)",
			"Backends 0, for connections from this node; dropped: no local backend",
		}, empty...), nil},
		"a cluster IP from outside": {web(datapathv1.ServiceOutcome_SERVICE_OUTCOME_INSIDE_ONLY), append([]string{
			"10.244.0.2 -> 10.96.0.10, tcp port 80: DROPPED (service-inside)",
			"Backends 0, for connections from this node; dropped: a cluster IP is not reachable from outside",
		}, empty...), nil},
		"a port that no service has": {noPort, []string{
			"10.244.0.2 -> 10.96.0.10, tcp port 80: REFUSED (no-service-port)",
			"Service none at this port; only services have this address",
		}, []string{"Frontend", "Backends", "Egress"}},
		"a port that no service has, from outside": {noPortOutside, []string{
			"10.244.0.2 -> 10.96.0.10, tcp port 80: DROPPED (no-service-port)",
		}, nil},
		"of an earlier process": {adopted, []string{
			"10.244.0.2 -> 10.96.0.10, tcp port 80: DROPPED (source ranges)",
			"Backends dropped: the sender is not in the source ranges",
			"Service not named by sluice-loadbalancer since sluice-datapath started", "Frontend 10.96.0.10:80/TCP",
		}, nil},
		"in transit": {led, []string{
			"10.244.0.2 -> 10.96.0.10, tcp port 80: FORWARDED (forwarded-to-stack)",
			"Backends 3, for connections from outside",
			"10.244.1.3:8080, 10.244.1.4:8080: FORWARDED in transit under 10.244.0.1 of this node; no policy applies",
			"192.0.2.1:8080: FORWARDED to a socket of this node; no policy applies",
		}, nil},
		"dropped in transit": {web(translated, unsourced), []string{"10.244.1.3:8080: DROPPED (nat-no-source)"}, nil},
		"from outside": {outside, []string{
			"10.244.0.2 -> 10.96.0.10, tcp port 80: NOT TRANSLATED", "Backends 2, for connections from outside; " +
				"not translated: the connection passes as if there were no service",
		}, []string{"Connection:"}},
	} {
		t.Run(name, func(t *testing.T) {
			n := nodetest.New(t, Command)
			n.Explained = map[string]*datapathv1.ExplainResponse{"10.96.0.10": c.answer}
			out, _ := n.Want(t, 0, "explain", "--from", "0123", "--to", "10.96.0.10", "--port", "80")
			nodetest.WantLines(t, out, c.want...)
			for _, text := range c.lacks {
				if strings.Contains(out, text) {
					t.Errorf("%q is in\n%s", text, out)
				}
			}
		})
	}
}

func TestExplainOfAServiceFindsTheConnectionOfABackend(t *testing.T) {
	n := nodetest.New(t, Command)
	answer := web(translated, at("10.244.0.3", forwarded), at("10.244.0.4", dropped))
	n.Explained = map[string]*datapathv1.ExplainResponse{"10.96.0.10": answer}
	args := []string{"explain", "--from", "0123", "--to", "10.96.0.10", "--port", "80", "--source-port", "4000"}
	out, _ := n.Want(t, 0, args...)
	nodetest.WantLines(t, out, "Connection: none is tracked")

	answer.GetService().GetBackends()[1].Connection = &datapathv1.Connection{
		InitiatorAddress: "10.244.0.2", InitiatorPort: 4000, ResponderAddress: "10.244.0.4", ResponderPort: 8080, Protocol: 6,
		States:       []datapathv1.ConnectionState{datapathv1.ConnectionState_CONNECTION_STATE_ESTABLISHED},
		LastSeenTime: timestamppb.Now(), NextVerdict: dropped, NextReason: datapathv1.Reason_REASON_POLICY_DENIED,
	}
	out, _ = n.Want(t, 0, args...)
	nodetest.WantLines(t, out, "Connection: 10.244.0.2:4000 -> 10.244.0.4:8080 tcp, established",
		"next packet DROPPED (policy-denied)")

	answer.GetService().GetBackends()[0] = inTransitAt("10.244.0.3", inTransit)
	answer.GetService().GetBackends()[0].Connection = &datapathv1.Connection{
		InitiatorAddress: "203.0.113.7", InitiatorPort: 4000, ResponderAddress: "10.244.0.3", ResponderPort: 8080,
		Protocol:     6,
		States:       []datapathv1.ConnectionState{datapathv1.ConnectionState_CONNECTION_STATE_ESTABLISHED},
		LastSeenTime: timestamppb.Now(), Current: true, NextVerdict: forwarded,
		NextReason: datapathv1.Reason_REASON_FORWARDED_TO_STACK, InTransit: true,
		SourceAddress: "10.244.0.1", SourcePort: 24711,
	}
	out, _ = n.Want(t, 0, args...)
	nodetest.WantLines(t, out, "Connection: 203.0.113.7:4000 -> 10.244.0.3:8080 tcp, established, in transit",
		"backend sees 10.244.0.1:24711", "next packet FORWARDED (forwarded-to-stack)")

	out, _ = n.Want(t, 0, append(args, "-o", "json")...)
	var x Explanation
	if err := json.Unmarshal([]byte(out), &x); err != nil {
		t.Fatal(err)
	}
	first, second := &datapathv1.ExplainedBackend{}, &datapathv1.ExplainedBackend{}
	if all := x.GetService().GetBackends(); len(all) == 2 {
		first, second = all[0], all[1]
	}
	if s := x.GetService(); s.GetService() != "shop/web:http" || s.GetOutside() || s.GetBackendCount() != 2 ||
		s.GetKind() != datapathv1.FrontendKind_FRONTEND_KIND_CLUSTER_IP || !Translated(s) || x.GetDestination() != nil ||
		second.GetVerdict() != datapathv1.Verdict_VERDICT_DROPPED || second.GetIngress().GetVerdict().GetRule() != 2 ||
		second.GetConnection().GetResponderAddress() != "10.244.0.4" || first.GetSourceAddress() != "10.244.0.1" ||
		!first.GetConnection().GetInTransit() || first.GetConnection().GetSourcePort() != 24711 {
		t.Errorf("JSON\n%s", out)
	}
}
