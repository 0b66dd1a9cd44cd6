// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package page

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/hubble/internal/api/observer"
	"github.com/sluice-net/sluice/services/hubble/internal/server/flowstream"
)

const (
	maxRequest  = 64 << 10 // bytes of a request for flows
	maxManifest = 1 << 20  // bytes of pasted policies
	maxNumber   = 10_000   // flows in one answer; a page cannot show more
)

// lines writes the messages of an answer, one JSON object in each line. The header is written with the first message,
// so that an error before it has a status of its own.
type lines struct {
	w       http.ResponseWriter
	control *http.ResponseController
	begun   bool
}

func linesTo(w http.ResponseWriter) *lines {
	return &lines{w: w, control: http.NewResponseController(w)}
}

func (l *lines) begin() {
	if !l.begun {
		l.begun = true
		l.w.Header().Set("Content-Type", "application/x-ndjson")
		l.w.WriteHeader(http.StatusOK)
	}
}

func (l *lines) write(line []byte) error {
	// A client that reads nothing ends its own call only.
	if err := l.control.SetWriteDeadline(time.Now().Add(sendTime)); err != nil {
		return err
	}
	l.begin()
	if _, err := l.w.Write(line); err != nil {
		return err
	}
	return l.control.Flush()
}

func (l *lines) send(m proto.Message) error {
	line, err := flowstream.Line(m)
	if err != nil {
		return err
	}
	return l.write(line)
}

// end writes the error of a call, if there is one.
func (l *lines) end(err error) {
	if err == nil {
		l.begin()
		return
	}
	if !l.begun {
		code := http.StatusBadGateway
		switch status.Code(err) {
		case codes.InvalidArgument, codes.Unimplemented, codes.NotFound, codes.FailedPrecondition:
			code = http.StatusBadRequest
		}
		http.Error(l.w, message(err), code)
		return
	}
	line, failed := json.Marshal(map[string]string{"error": message(err)})
	if failed == nil {
		_ = l.write(append(line, '\n')) // the client may have gone, which is why the call has ended
	}
}

// message returns the text of an error without its gRPC code.
func message(err error) string {
	if s, ok := status.FromError(err); ok {
		return s.Message()
	}
	return err.Error()
}

// flows answers a request of Hubble's API, as JSON.
func (s *Server) flows(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxRequest))
	if err != nil {
		http.Error(w, err.Error(), http.StatusRequestEntityTooLarge)
		return
	}
	request := new(observer.GetFlowsRequest)
	if err := protojson.Unmarshal(body, request); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if request.GetNumber() > maxNumber {
		http.Error(w, fmt.Sprintf("number: at most %d", maxNumber), http.StatusBadRequest)
		return
	}
	to := linesTo(w)
	if request.GetFollow() {
		to.begin() // there may be no flow for long
		if err := to.control.Flush(); err != nil {
			return
		}
	}
	to.end(s.o.Flows(request, flowstream.To(r.Context(), func(m *observer.GetFlowsResponse) error { return to.send(m) })))
}

// policies answers with the manifests of a policy, which the query names.
func (s *Server) policies(w http.ResponseWriter, r *http.Request) {
	q, to := r.URL.Query(), linesTo(w)
	if q.Get("kind") == "" || q.Get("name") == "" {
		http.Error(w, "kind and name are required", http.StatusBadRequest)
		return
	}
	stream, err := s.o.Policies.ListPolicies(r.Context(), &policyv1.ListPoliciesRequest{
		Kind: q.Get("kind"), Namespace: q.Get("namespace"), Name: q.Get("name"), WithManifests: true,
	})
	if err != nil {
		to.end(err)
		return
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			to.end(nil)
			return
		}
		if err == nil {
			var line []byte
			line, err = json.Marshal(map[string]any{
				"source": m.GetPolicy().GetSource(), "origin": m.GetPolicy().GetOrigin(),
				"revision": m.GetPolicy().GetRevision(), "manifest": string(m.GetPolicy().GetManifest()),
			})
			if err == nil {
				err = to.write(append(line, '\n'))
			}
		}
		if err != nil {
			to.end(err)
			return
		}
	}
}

// diff answers with the verdicts that would change if the pasted policies were applied.
func (s *Server) diff(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxManifest))
	if err != nil {
		http.Error(w, err.Error(), http.StatusRequestEntityTooLarge)
		return
	}
	to := linesTo(w)
	stream, err := s.o.Policies.Diff(r.Context(), &policyv1.DiffRequest{Manifests: body})
	for err == nil {
		var m *policyv1.DiffResponse
		if m, err = stream.Recv(); err == nil {
			err = to.send(m)
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	to.end(err)
}
