// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package explain

import (
	"fmt"
	"io"
	"net/netip"
	"strings"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	"github.com/sluice-net/sluice/cmd/sluice/internal/service"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
)

// explainedService is the service whose frontend the destination is.
type explainedService struct {
	Service  string `json:"service,omitempty"` // "shop/web"; empty: not known
	PortName string `json:"portName,omitempty"`
	Address  string `json:"address,omitempty"` // empty: every address of the node
	Port     uint32 `json:"port"`
	Protocol string `json:"protocol"`
	Kind     string `json:"kind,omitempty"`
	// List is "inside" or "outside": which one counts for the sender.
	List         string             `json:"list"`
	Outcome      string             `json:"outcome"`
	BackendCount uint32             `json:"backendCount"`
	Backends     []explainedBackend `json:"backends,omitempty"` // that were evaluated

	frontend string
}

// explainedBackend is what becomes of the connection at one backend.
type explainedBackend struct {
	Address    string             `json:"address"`
	Port       uint32             `json:"port"`
	Path       string             `json:"path"`
	Verdict    string             `json:"verdict,omitempty"`
	Reason     string             `json:"reason,omitempty"`
	Peer       *explainedPeer     `json:"peer"`
	Egress     *explainedSide     `json:"egress,omitempty"`
	Ingress    *explainedSide     `json:"ingress,omitempty"`
	Connection *trackedConnection `json:"connection,omitempty"`
	// Source is the address of this node that a backend elsewhere sees.
	Source string `json:"source,omitempty"`
}

// explainedServiceOf shows a service; nil if there is none.
func explainedServiceOf(s *datapathv1.ExplainedService, protocol uint32) *explainedService {
	if s == nil {
		return nil
	}
	name, portName, _ := strings.Cut(s.GetService(), ":")
	shown := &explainedService{
		Service: name, PortName: portName, Address: s.GetAddress(), Port: s.GetPort(),
		Protocol: ports.ProtocolText(protocol), Kind: output.Enum(s.GetKind(), "FRONTEND_KIND_"), List: "inside",
		Outcome: output.Enum(s.GetOutcome(), "SERVICE_OUTCOME_"), BackendCount: s.GetBackendCount(),
	}
	port := service.PortText(s.GetPort(), netv1.Protocol(protocol))
	shown.frontend = service.AddressText(s.GetAddress(), s.GetPort()) + strings.TrimLeft(port, "0123456789")
	switch s.GetKind() {
	case datapathv1.FrontendKind_FRONTEND_KIND_NODE_PORT, datapathv1.FrontendKind_FRONTEND_KIND_HOST_PORT:
		if a, err := netip.ParseAddr(s.GetAddress()); err != nil || a.IsUnspecified() {
			shown.Address, shown.frontend = "", "node:"+port
		}
	}
	if s.GetOutside() {
		shown.List = "outside"
	}
	for _, b := range s.GetBackends() {
		shown.Backends = append(shown.Backends, explainedBackend{
			Address: b.GetAddress(), Port: b.GetPort(), Path: output.Enum(b.GetPath(), "BACKEND_PATH_"),
			Verdict: output.Enum(b.GetVerdict(), "VERDICT_"), Reason: output.Enum(b.GetReason(), "REASON_"),
			Peer: explainedPeerOf(b.GetPeer()), Egress: explainedSideOf(b.GetEgress()),
			Ingress: explainedSideOf(b.GetIngress()), Connection: connectionOf(b.GetConnection()),
			Source: b.GetSourceAddress(),
		})
	}
	return shown
}

// Translated reports whether the connection goes to one of the backends.
func (s *explainedService) Translated() bool { return s != nil && s.Outcome == "translated" }

// headline is what becomes of a connection of which the reasons do not tell it.
func (s *explainedService) headline(verdict string) string {
	switch s.Outcome {
	case "no-backend":
		return "REFUSED (no backend)"
	case "no-local-backend":
		return "DROPPED (no local backend)"
	case "source-ranges":
		return "DROPPED (source ranges)"
	case "inside-only":
		return "DROPPED (service-inside)"
	case "no-port":
		if s.List == "outside" {
			return "DROPPED (no-service-port)"
		}
		return "REFUSED (no-service-port)"
	case "not-translated":
		return "NOT TRANSLATED"
	}
	if verdict != "" {
		return strings.ToUpper(verdict)
	}
	for _, b := range s.Backends {
		if b.Path != "not-local" {
			return "DEPENDS ON THE BACKEND"
		}
	}
	return "NO POLICY OF THIS NODE IS ASKED"
}

// hostPort is the kind of a frontend that is of no service.
const hostPort = "host-port"

// lines name the service, its frontend and its list of backends.
func (s *explainedService) lines(w io.Writer) {
	if s == nil {
		return
	}
	if s.Outcome == "no-port" {
		fmt.Fprintln(w)
		output.Row(w, "Service", "none at this port; the address is of services alone")
		return
	}
	name := s.Service
	switch {
	case name == "":
		name = "not named by sluice-loadbalancer since sluice-datapath started"
	case s.PortName != "":
		name += ", port " + s.PortName
	}
	frontend := s.frontend
	if s.Kind != "" {
		frontend += ", " + s.Kind
	}
	fmt.Fprintln(w)
	label := "Service"
	if s.Kind == hostPort {
		label = "Host port of"
	}
	output.Row(w, label, name)
	output.Row(w, "Frontend", frontend)
	output.Row(w, "Backends", s.backendsText())
}

// backendsText says how many backends there are, and what that means.
func (s *explainedService) backendsText() string {
	text := fmt.Sprintf("%d, for connections from %s", s.BackendCount,
		map[string]string{"inside": "this node", "outside": "outside"}[s.List])
	switch s.Outcome {
	case "no-backend":
		return text + "; refused: no backend"
	case "no-local-backend":
		return text + "; dropped: no local backend"
	case "source-ranges":
		return "dropped: the sender is in none of its source ranges"
	case "inside-only":
		return text + "; dropped: a cluster IP does not answer outside"
	case "not-translated":
		return text + "; not translated: the connection passes as if there were no service"
	}
	if n := int(s.BackendCount) - len(s.Backends); n > 0 {
		text += fmt.Sprintf("; %d of them are not evaluated", n)
	}
	return text
}

func (b explainedBackend) text() string { return service.AddressText(b.Address, b.Port) }

// Headline returns the verdict of the node on the connection to the backend.
func (b explainedBackend) Headline() string {
	switch {
	case b.Path == "own-namespace":
		return "FORWARDED inside the pod, where no policy is asked"
	case b.Path == "not-local":
		return "not evaluated: neither end is a pod of this node"
	case b.Verdict == "dropped":
	case b.Path == "in-transit":
		return "FORWARDED in transit under " + b.Source + " of this node, which asks no policy"
	case b.Path == "host-socket":
		return "FORWARDED to a socket of this node, which asks no policy"
	}
	text := fmt.Sprintf("%s (%s)", strings.ToUpper(b.Verdict), b.Reason)
	if node := b.Peer.otherNode(); node != "" && b.Verdict != "dropped" {
		text = fmt.Sprintf("%s by this node (%s); %s, which has the backend, was not asked", strings.ToUpper(b.Verdict),
			b.Reason, node)
	}
	return text
}

// OtherNode is the other node that enforces the policies of the backend; empty: the node that answers does, or the
// backend is no pod.
func (b explainedBackend) OtherNode() string { return b.Peer.otherNode() }

// Because names the rule or default that decided on a side; empty if the side was not evaluated.
func (s *explainedSide) Because() string {
	if s == nil {
		return ""
	}
	return s.Verdict.Verdict + " " + s.Verdict.Because()
}

// verdicts say what becomes of the connection, once for all backends of which the
// same is to be said by the same rules.
func (s *explainedService) verdicts(w io.Writer, connections bool) {
	type outcome struct{ headline, egress, ingress string }
	var order []outcome
	groups := map[outcome][]explainedBackend{}
	for _, b := range s.Backends {
		o := outcome{b.Headline(), b.Egress.Because(), b.Ingress.Because()}
		if groups[o] == nil {
			order = append(order, o)
		}
		groups[o] = append(groups[o], b)
	}
	for _, o := range order {
		fmt.Fprintln(w)
		var at []string
		for _, b := range groups[o] {
			at = append(at, b.text())
		}
		fmt.Fprintln(w, output.Printable(strings.Join(at, ", ")+": "+o.headline))
		for _, side := range []struct{ name, because string }{{"  egress", o.egress}, {"  ingress", o.ingress}} {
			if side.because != "" {
				output.Row(w, side.name, side.because)
			}
		}
	}
	if !connections {
		return
	}
	tracked := false
	for _, b := range s.Backends {
		if b.Connection != nil {
			tracked = true
			fmt.Fprintln(w)
			b.Connection.lines(w)
		}
	}
	if !tracked {
		fmt.Fprintln(w, "\nConnection: none is tracked")
	}
}
