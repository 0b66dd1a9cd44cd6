// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frames

import (
	"strconv"

	"golang.org/x/net/http2"
)

// The refusals.
const (
	statusBadRequest = 400
	statusForbidden  = 403
	statusTooLarge   = 431
)

// body is the content of every refusal, as Cilium sends it.
const body = "Access denied"

// maxReserve is the part of the window of the connection that the relay keeps for the bodies of refusals.
const maxReserve = 1024

// refusal keeps windows for the bodies of refusals. The server does not know of these bodies, so it must not use the
// whole window of the connection. The relay keeps the first bytes that the client adds to the window, and gets them
// back when the client has read a body. Without enough bytes a refusal has no body.
type refusal struct {
	active  bool
	reserve uint32
	window  uint32 // initial window of a stream
}

// begin is for a new connection. A connection that continues does not know its windows.
func (r *refusal) begin() { r.active, r.window = true, 65535 }

// keep takes bytes from an update of the window, and returns the rest for the server.
func (r *refusal) keep(increment uint32) uint32 {
	if !r.active {
		return increment
	}
	n := min(increment, maxReserve-r.reserve)
	r.reserve += n
	return increment - n
}

// take takes the window for a body.
func (r *refusal) take() bool {
	if !r.active || r.reserve < uint32(len(body)) || r.window < uint32(len(body)) {
		return false
	}
	r.reserve -= uint32(len(body))
	return true
}

// refuse answers a request that the server does not get. Its header block has only literals without indexing, behind
// the size 0 of the table, so it does not change what the client knows of the server's table.
func (c *clientSide) refuse(id uint32, status int) error {
	block := []byte{0x20}
	grpc := c.request.gRPC()
	withBody := false
	if grpc {
		block = appendStatus(block, "200")
		block = appendLiteral(block, "content-type", "application/grpc")
		block = appendLiteral(block, "grpc-status", grpcStatus(status))
		block = appendLiteral(block, "grpc-message", body)
	} else {
		withBody = c.request.Method != "HEAD" && c.refusal.take()
		block = appendStatus(block, strconv.Itoa(status))
		if withBody {
			block = appendLiteral(block, "content-type", "text/plain")
			block = appendLiteral(block, "content-length", strconv.Itoa(len(body)))
		}
	}
	flags := http2.FlagHeadersEndHeaders
	if !withBody {
		flags |= http2.FlagHeadersEndStream
	}
	out := appendHeader(nil, len(block), http2.FrameHeaders, flags, id)
	out = append(out, block...)
	if withBody {
		out = appendHeader(out, len(body), http2.FrameData, http2.FlagDataEndStream, id)
		out = append(out, body...)
	}
	if !c.block.ends {
		// The client need not send the rest (RFC 9113, 8.1). The relay drops data in flight, and gives credit
		// for it.
		out = append(out, resetFrame(id, http2.ErrCodeNo)...)
	}
	if err := c.toClient.add(out); err != nil {
		return &Error{Code: http2.ErrCodeEnhanceYourCalm, Reason: err.Error()}
	}
	return c.reset()
}

// grpcStatus returns PERMISSION_DENIED or, for a request that cannot be evaluated, INTERNAL, as gRPC maps 400 and 431.
func grpcStatus(status int) string {
	if status == statusForbidden {
		return "7"
	}
	return "13"
}

// appendStatus appends a literal with the name of entry 8 of the static table.
func appendStatus(block []byte, text string) []byte {
	block = append(block, firstStatus, byte(len(text)))
	return append(block, text...)
}

// appendLiteral appends a literal with a short name and value.
func appendLiteral(block []byte, name, value string) []byte {
	block = append(block, 0, byte(len(name)))
	block = append(block, name...)
	block = append(block, byte(len(value)))
	return append(block, value...)
}
