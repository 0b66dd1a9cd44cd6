// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package explain

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/observe"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/peer"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	"github.com/sluice-net/sluice/cmd/sluice/internal/verdict"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

// runStored shows the latest verdict on a connection before a time, as sluice-hubble stored it.
func runStored(ctx context.Context, inv *invocation.Invocation, o peer.Flags, when string, now time.Time) error {
	at, err := observe.TimeOf("--at", when, now)
	if err != nil {
		return err
	}
	q := observe.Question{At: at}
	if q.From, q.To, err = o.Ends(); err != nil {
		return err
	}
	var conn peer.Connection
	if err := o.Complete(&conn); err != nil {
		return err
	}
	q.Protocol, q.SourcePort, q.Port = conn.Protocol, conn.SourcePort, conn.Port
	f, missing, err := observe.LastVerdict(ctx, inv, q)
	if err != nil {
		return err
	}
	if f == nil {
		text := fmt.Sprintf("no verdict on a connection from %s to %s, %s, is stored from before %s", q.From, q.To,
			ports.ServiceText(q.Protocol, q.Port), at.Local().Format(time.DateTime))
		if !missing.IsZero() {
			text += "; events up to " + missing.Local().Format(time.DateTime) + " are missing in the history"
		}
		return fmt.Errorf("%s; `sluice observe --until` shows the stored events", text)
	}
	return inv.Show(message.Of(f, message.Fact{Key: "at", Value: at}), func(w io.Writer) { storedLines(w, f, at) })
}

func storedLines(w io.Writer, f *datapathv1.Flow, at time.Time) {
	from, to := f.GetSource(), f.GetDestination()
	decided := f.GetTime().AsTime()
	fmt.Fprintln(w, output.Printable(fmt.Sprintf("%s -> %s, %s: %s", endText(from.GetAddress(), from.GetPort()),
		endText(to.GetAddress(), to.GetPort()), ports.ProtocolText(uint32(f.GetProtocol())),
		VerdictText(f.GetVerdict(), f.GetReason()))))
	fmt.Fprintln(w, output.Printable(fmt.Sprintf("decided by %s at %s, %s before %s", f.GetNodeName(),
		decided.Local().Format("2006-01-02 15:04:05.000"), at.Sub(decided).Round(time.Second),
		at.Local().Format(time.DateTime))))
	if s := f.GetOriginalDestinationAddress(); s != "" {
		fmt.Fprintln(w, output.Printable(strings.TrimSpace(fmt.Sprintf("sent to %s, service %s",
			endText(s, f.GetOriginalDestinationPort()), f.GetService()))))
	}
	fmt.Fprintln(w)
	output.Row(w, "END", "POD", "IDENTITY", "LABELS")
	for _, e := range []struct {
		name string
		end  *datapathv1.FlowEnd
	}{{"from", from}, {"to", to}} {
		pod := "none of this node"
		switch {
		case e.end.GetPod().GetName() != "":
			pod = e.end.GetPod().GetNamespace() + "/" + e.end.GetPod().GetName()
		case e.end.GetOwner() != nil:
			pod = workload.OwnerOf(e.end.GetOwner()).String()
		case e.end.GetNodeName() != "":
			pod = "on " + e.end.GetNodeName()
		}
		output.Row(w, e.name, pod, e.end.GetIdentity(), workload.Text(workload.LabelTextsInOrder(e.end.GetLabels())))
	}
	for _, s := range []struct {
		title string
		side  *datapathv1.SideVerdict
	}{{"Egress, the sender's policy", f.GetEgress()}, {"Ingress, the receiver's policy", f.GetIngress()}} {
		if s.side == nil {
			continue
		}
		fmt.Fprintf(w, "\n%s\n", output.Printable(s.title+": "+verdict.Text(s.side)))
		if s.side.GetRevision() != 0 {
			output.Row(w, "  policy revision", s.side.GetRevision())
		}
		output.Row(w, "  rule", ruleNumber(s.side.GetRule()))
	}
}
