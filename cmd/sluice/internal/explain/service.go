// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package explain

import (
	"fmt"
	"io"
	"net/netip"
	"strings"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/service"
	"github.com/sluice-net/sluice/cmd/sluice/internal/verdict"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
)

// Translated reports whether the connection goes to one of the backends.
func Translated(s *datapathv1.ExplainedService) bool {
	return s.GetOutcome() == datapathv1.ServiceOutcome_SERVICE_OUTCOME_TRANSLATED
}

// serviceHeadline returns the headline for a connection to a Service if the explanation contains no reason.
func serviceHeadline(s *datapathv1.ExplainedService, v datapathv1.Verdict) string {
	switch s.GetOutcome() {
	case datapathv1.ServiceOutcome_SERVICE_OUTCOME_NO_BACKEND:
		return "REFUSED (no backend)"
	case datapathv1.ServiceOutcome_SERVICE_OUTCOME_NO_LOCAL_BACKEND:
		return "DROPPED (no local backend)"
	case datapathv1.ServiceOutcome_SERVICE_OUTCOME_SOURCE_RANGES:
		return "DROPPED (source ranges)"
	case datapathv1.ServiceOutcome_SERVICE_OUTCOME_INSIDE_ONLY:
		return "DROPPED (service-inside)"
	case datapathv1.ServiceOutcome_SERVICE_OUTCOME_NO_PORT:
		if s.GetOutside() {
			return "DROPPED (no-service-port)"
		}
		return "REFUSED (no-service-port)"
	case datapathv1.ServiceOutcome_SERVICE_OUTCOME_NOT_TRANSLATED:
		return "NOT TRANSLATED"
	}
	if v != datapathv1.Verdict_VERDICT_UNSPECIFIED {
		return verdictText(v)
	}
	for _, b := range s.GetBackends() {
		if b.GetPath() != datapathv1.BackendPath_BACKEND_PATH_NOT_LOCAL {
			return "DEPENDS ON THE BACKEND"
		}
	}
	return "NO POLICY OF THIS NODE APPLIES"
}

// frontendText returns "10.96.0.1:80/TCP, cluster-ip", or "node:30080/TCP, node-port" for a port on all addresses of
// the node.
func frontendText(s *datapathv1.ExplainedService, protocol uint32) string {
	port := service.PortText(s.GetPort(), netv1.Protocol(protocol))
	text := service.AddressText(s.GetAddress(), s.GetPort()) + strings.TrimLeft(port, "0123456789")
	switch s.GetKind() {
	case datapathv1.FrontendKind_FRONTEND_KIND_UNSPECIFIED:
		return text
	case datapathv1.FrontendKind_FRONTEND_KIND_NODE_PORT, datapathv1.FrontendKind_FRONTEND_KIND_HOST_PORT:
		if a, err := netip.ParseAddr(s.GetAddress()); err != nil || a.IsUnspecified() {
			text = "node:" + port
		}
	}
	return text + ", " + output.Enum(s.GetKind(), "FRONTEND_KIND_")
}

// serviceLines writes the service, its frontend and its backends.
func serviceLines(w io.Writer, s *datapathv1.ExplainedService, protocol uint32) {
	if s == nil {
		return
	}
	fmt.Fprintln(w)
	if s.GetOutcome() == datapathv1.ServiceOutcome_SERVICE_OUTCOME_NO_PORT {
		output.Row(w, "Service", "none at this port; only services have this address")
		return
	}
	name, port, _ := strings.Cut(s.GetService(), ":")
	switch {
	case name == "":
		name = "not named by sluice-loadbalancer since sluice-datapath started"
	case port != "":
		name += ", port " + port
	}
	label := "Service"
	if s.GetKind() == datapathv1.FrontendKind_FRONTEND_KIND_HOST_PORT {
		label = "Host port of"
	}
	output.Row(w, label, name)
	output.Row(w, "Frontend", frontendText(s, protocol))
	output.Row(w, "Backends", backendsText(s))
}

// backendsText returns the number of backends. If it is 0, the text also states the effect on connections.
func backendsText(s *datapathv1.ExplainedService) string {
	from := "this node"
	if s.GetOutside() {
		from = "outside"
	}
	text := fmt.Sprintf("%d, for connections from %s", s.GetBackendCount(), from)
	switch s.GetOutcome() {
	case datapathv1.ServiceOutcome_SERVICE_OUTCOME_NO_BACKEND:
		return text + "; refused: no backend"
	case datapathv1.ServiceOutcome_SERVICE_OUTCOME_NO_LOCAL_BACKEND:
		return text + "; dropped: no local backend"
	case datapathv1.ServiceOutcome_SERVICE_OUTCOME_SOURCE_RANGES:
		return "dropped: the sender is not in the source ranges"
	case datapathv1.ServiceOutcome_SERVICE_OUTCOME_INSIDE_ONLY:
		return text + "; dropped: a cluster IP is not reachable from outside"
	case datapathv1.ServiceOutcome_SERVICE_OUTCOME_NOT_TRANSLATED:
		return text + "; not translated: the connection passes as if there were no service"
	}
	if n := int(s.GetBackendCount()) - len(s.GetBackends()); n > 0 {
		text += fmt.Sprintf("; %d of them are not evaluated", n)
	}
	return text
}

// BackendHeadline returns the verdict of the node on the connection to a backend.
func BackendHeadline(b *datapathv1.ExplainedBackend) string {
	dropped := b.GetVerdict() == datapathv1.Verdict_VERDICT_DROPPED
	switch path := b.GetPath(); {
	case path == datapathv1.BackendPath_BACKEND_PATH_OWN_NAMESPACE:
		return "FORWARDED inside the pod, where no policy applies"
	case path == datapathv1.BackendPath_BACKEND_PATH_NOT_LOCAL:
		return "not evaluated: neither end is a pod of this node"
	case dropped:
	case path == datapathv1.BackendPath_BACKEND_PATH_IN_TRANSIT:
		return "FORWARDED in transit under " + b.GetSourceAddress() + " of this node; no policy applies"
	case path == datapathv1.BackendPath_BACKEND_PATH_HOST_SOCKET:
		return "FORWARDED to a socket of this node; no policy applies"
	}
	if node := OtherNode(b.GetPeer()); node != "" && !dropped {
		return fmt.Sprintf("%s by this node (%s); %s, which has the backend, was not asked", verdictText(b.GetVerdict()),
			reasonText(b.GetReason()), node)
	}
	return VerdictText(b.GetVerdict(), b.GetReason())
}

// verdicts writes the verdict for each backend. Backends with the same verdict from the same rules share one text.
func verdicts(w io.Writer, s *datapathv1.ExplainedService, connections bool) {
	type outcome struct{ headline, egress, ingress string }
	var order []outcome
	at := map[outcome][]string{}
	for _, b := range s.GetBackends() {
		o := outcome{
			BackendHeadline(b), verdict.Text(b.GetEgress().GetVerdict()), verdict.Text(b.GetIngress().GetVerdict()),
		}
		if at[o] == nil {
			order = append(order, o)
		}
		at[o] = append(at[o], service.AddressText(b.GetAddress(), b.GetPort()))
	}
	for _, o := range order {
		fmt.Fprintln(w)
		fmt.Fprintln(w, output.Printable(strings.Join(at[o], ", ")+": "+o.headline))
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
	for _, b := range s.GetBackends() {
		if b.GetConnection() != nil {
			tracked = true
			fmt.Fprintln(w)
			connectionLines(w, b.GetConnection())
		}
	}
	if !tracked {
		fmt.Fprintln(w, "\nConnection: none is tracked")
	}
}
